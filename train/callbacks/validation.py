"""Validation between steps: loss in nats per token and bits per UTF-8 byte over the whole validation split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from train.callbacks.throughput import Throughput
from train.datamodule import PackedDataModule, StreamItem


@dataclass(frozen=True)
class Validated:
    loss: float  # nats per target
    bits_per_byte: float | None  # None where the data has no text


def bits_per_byte(nats: float, n_bytes: int) -> float | None:
    return nats / math.log(2) / n_bytes if n_bytes else None


class Validation(Callback):
    """Validates every `every` steps and after the last one.

    Args:
        row: the values of the current step; val_loss and val_bits_per_byte are added.
        throughput: its clock stands still meanwhile.
        every: steps between passes; 0 validates after the last step only.
        say: hears each result, with `baselines` behind it.
        baselines: what other predictors reach on the same text, as printed ("unigram 2.79, gzip -9 1.63").
    """

    def __init__(
        self,
        row: dict[str, float],
        throughput: Throughput,
        every: int,
        say: Callable[[str], None],
        baselines: str = "",
    ) -> None:
        self.row = row
        self.throughput = throughput
        self.every = every
        self.say = say
        self.baselines = baselines

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step < trainer.max_steps and not (self.every and step % self.every == 0):
            return
        with self.throughput.paused():
            result = validate(trainer, pl_module)
        self.row["val_loss"] = result.loss
        line = f"step {step}: validation loss {result.loss:.4f}"
        if result.bits_per_byte is not None:
            self.row["val_bits_per_byte"] = result.bits_per_byte
            line += f", {result.bits_per_byte:.3f} bits per byte" + (f" ({self.baselines})" if self.baselines else "")
        self.say(line)


def validate(trainer: Trainer, module: LightningModule) -> Validated:
    """One pass over the validation split by all ranks; dropout off, random number generators untouched."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(data, PackedDataModule), "fit() attaches the data module"
    nats = torch.zeros((), dtype=torch.float64, device=module.device)
    n_targets = n_bytes = 0
    module.eval()
    try:
        with torch.no_grad():
            for i, step in enumerate(data.validation_steps()):
                own = trainer.strategy.validation_step(step.to(module.device), i)
                assert isinstance(own, torch.Tensor), "GPTModule.validation_step returns nats"
                nats += own
                n_targets += step.n_targets
                n_bytes += step.n_bytes
    finally:
        module.train()
    total = float(trainer.strategy.reduce(nats, reduce_op="sum"))
    return Validated(total / n_targets if n_targets else math.nan, bits_per_byte(total, n_bytes))
