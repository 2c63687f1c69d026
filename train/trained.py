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
            FileNotFoundError: it is not there, as for a run on synthetic tokens.
        """
        from data.tokenizer import Tokenizer

        path = tokenizer_path(self.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer.json in {path.parent}: this run has no text tokenizer, or it was moved"
            )
        return Tokenizer.from_file(path)


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
