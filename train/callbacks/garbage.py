"""Python's cyclic garbage collector, kept out of the steps: a pass over a large heap outlasts the queue of launches.

Reference counting frees tensors as ever; only cycles wait for a log point.
"""

from __future__ import annotations

import gc
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from train.datamodule import StreamItem


class GarbageCollection(Callback):
    """Collects at log points, and looks only at what has come since start-up and the first steps' compilation.

    Args:
        log_every: steps between two collections.
    """

    def __init__(self, log_every: int) -> None:
        self.log_every = log_every
        self._was_enabled: bool | None = None  # None outside of training
        self._compiled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._was_enabled = gc.isenabled()
        self._compiled = False
        gc.disable()
        gc.collect()
        gc.freeze()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        if trainer.global_step % self.log_every:
            return
        gc.collect()
        if not self._compiled:  # compiled graphs are many objects that live as long as the run
            gc.freeze()
            self._compiled = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._was_enabled is None:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
