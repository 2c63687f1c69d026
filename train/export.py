"""`python -m train.export`: the weights of a checkpoint as one safetensors file, the model's shape in its metadata."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from train import cli
from train.schema import ExportConfig


def run(config: ExportConfig) -> None:
    path = export(config)
    print(f"{path} ({path.stat().st_size / (1 << 20):.1f} MiB); `model.weights.load_safetensors` opens it")


def export(config: ExportConfig) -> Path:
    """Writes the file and returns its path; one of that name is replaced."""
    from model.weights import export_safetensors
    from train.trained import open_trained

    assert config.checkpoint is not None, "ExportConfig refuses null"
    trained = open_trained(config.checkpoint, "cpu", attention="reference", say=lambda line: None)
    path = Path(config.output) if config.output else trained.path.parent.parent / "model.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    export_safetensors(trained.model, path)
    return path


COMMAND = cli.Command("train.export", "export", ExportConfig, run, literal=("checkpoint", "output"))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
