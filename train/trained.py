"""A trained model opened for use: weights, tokenizer and the precision they run in. For generate, evaluate, export."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoint import find_checkpoint, load_model, tokenizer_path

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from model.gpt import GPT


@dataclass(frozen=True)
class Trained:
    model: GPT
    checkpoint: dict[str, Any]
    path: Path  # of the checkpoint file
    device: torch.device
    precision: str

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16-mixed":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run copied beside its checkpoints.

        Raises:
            ValueError: it is not there, or the run was on synthetic tokens and has none for text.
        """
        from data.tokenizer import Tokenizer

        path = tokenizer_path(self.path)
        if not path.is_file():
            raise ValueError(f"checkpoint must lie in its run directory, beside tokenizer.json; there is no {path}")
        tokenizer = Tokenizer.from_file(path, self.checkpoint["run_config"]["tokenizer"]["end_of_text"])
        if not tokenizer.is_text:
            raise ValueError(f"checkpoint must be of a run on text, {self.path} was trained on synthetic tokens")
        return tokenizer


def open_trained(
    checkpoint: str,
    accelerator: str = "auto",
    precision: str | None = None,
    attention: str = "auto",
    say: Callable[[str], None] = print,
) -> Trained:
    """The newest checkpoint of a run directory, or a checkpoint file, on the device that `accelerator` means."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("accelerator must be cpu or auto on a machine without a CUDA GPU, got 'gpu'")
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    path = find_checkpoint(Path(checkpoint))
    model, loaded = load_model(path, device, attention, say)
    precision = precision or ("bf16-mixed" if on_gpu else "32-true")
    model.to(torch.float64 if precision == "64-true" else torch.bfloat16 if precision == "bf16-true" else torch.float32)
    return Trained(model, loaded, path, device, precision)
