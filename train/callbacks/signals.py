"""SIGTERM and SIGINT end a run between two steps, after a checkpoint; a second SIGINT aborts at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from train.callbacks.checkpoint import Checkpoint
from train.datamodule import StreamItem

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _nothing() -> None:
    """Takes the place of Lightning's question to all ranks."""


class Signals(Callback):
    """Remembers a signal, and stops the trainer at the end of the step with the state saved.

    With several ranks they agree at log points, where they wait for the device anyway.
    """

    def __init__(self, checkpoint: Checkpoint, log_every: int, say: Callable[[str], None]) -> None:
        self.checkpoint = checkpoint
        self.log_every = log_every
        self.say = say
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            # Lightning asks all ranks after every step whether one was told to stop: the host would wait for the GPU.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
        # Only now: Lightning has just put in its own SIGTERM handler, which ends a run with an exception.
        self._before = {signum: signal.signal(signum, self._remember) for signum in _SIGNALS}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            return
        if self.received is None:
            self.received = signum
            # os.write and not print: the handler may have interrupted a print
            os.write(2, f"\n{signal.Signals(signum).name}: finishing the step and saving (again: abort)\n".encode())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        if trainer.world_size > 1:
            if trainer.global_step % self.log_every:
                return
            received = trainer.strategy.reduce_boolean_decision(self.received is not None, all=False)
        else:
            received = self.received is not None
        if received:
            self.received = self.received or signal.SIGTERM
            path = self.checkpoint.save(trainer)
            self.say(f"stopped at step {trainer.global_step}, saved {path}; resume=auto continues")
            trainer.should_stop = True
