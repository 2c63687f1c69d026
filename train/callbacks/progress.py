"""A bar on a terminal, a line now and then elsewhere: step, loss, tokens/s, gemm_util, time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from train.datamodule import StreamItem

_SECONDS_BETWEEN_LINES = 15.0


def say(line: str) -> None:
    """Print a line without tearing the bar apart; the first rank alone is given this function."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Progress(Callback):
    """Shows the shared row; asks the device for nothing."""

    def __init__(self, row: dict[str, float]) -> None:
        self.row = row
        self._bar: Any = None
        self._shown: dict[str, str] = {}
        self._begin_step = 0
        self._begin = self._last_line = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_step = trainer.global_step
        self._begin = self._last_line = time.perf_counter()
        if trainer.is_global_zero and sys.stderr.isatty():
            self._bar = tqdm(
                total=trainer.max_steps, initial=trainer.global_step, unit="step", dynamic_ncols=True, desc="train"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        if "loss" in self.row:
            self._shown.update(_texts(self.row))
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update()
        elif "loss" in self.row:
            self._line(trainer.global_step, int(trainer.max_steps))

    def _line(self, step: int, max_steps: int) -> None:
        now = time.perf_counter()
        if now - self._last_line < _SECONDS_BETWEEN_LINES and step < max_steps:
            return
        self._last_line = now
        left = (now - self._begin) / (step - self._begin_step) * (max_steps - step)
        shown = ", ".join(f"{key} {text}" for key, text in self._shown.items())
        say(f"step {step}/{max_steps}: {shown}, {_duration(left)} left")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _texts(row: dict[str, float]) -> dict[str, str]:
    texts = {"loss": f"{row['loss']:.3f}"}
    if "tokens_per_s" in row:
        texts["tokens/s"] = f"{row['tokens_per_s']:,.0f}"
    for key in ("mfu", "gemm_util"):
        if key in row:
            texts[key] = f"{row[key]:.0%}"
    return texts


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
