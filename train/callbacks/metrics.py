"""The row of a log point: what the device counted, the learning rate, tokens and time; and its way to the loggers."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from train.datamodule import StreamItem
from train.module import GPTModule
from train.optim import learning_rate


class TrainingMetrics(Callback):
    """Every `log_every` steps: loss (mean of the interval), lr and grad_norm (last step), skipped_steps, tokens, time.

    Raises:
        ValueError: more than `nonfinite_budget` steps were skipped. Learned here and not in the step, so up to
            `log_every` steps late; the weights have not moved in the skipped ones.
    """

    def __init__(self, row: dict[str, float], log_every: int, nonfinite_budget: int) -> None:
        self.row = row
        self.log_every = log_every
        self.nonfinite_budget = nonfinite_budget
        self.tokens = 0  # real tokens since step 0, all ranks
        self._seconds_before = 0.0  # trained by earlier processes of this run
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Training time since step 0, summed over resumes."""
        return self._seconds_before + time.perf_counter() - self._since

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GPTModule), "the callbacks of fit() serve one module"
        self.tokens += batch.batch.n_tokens
        step = trainer.global_step
        if step % self.log_every and step != trainer.max_steps:
            return
        interval = pl_module.statistics.read()
        self.row.update(
            tokens=self.tokens,
            loss=interval.loss,
            lr=learning_rate(step - 1, pl_module.optim, pl_module.max_steps),
            grad_norm=interval.grad_norm,
            skipped_steps=interval.skipped_steps,
            time=self.seconds,
        )
        if interval.skipped_steps > self.nonfinite_budget:
            raise ValueError(
                f"training stopped at step {step}: {interval.skipped_steps} steps had a non-finite loss or gradient "
                f"and were skipped, more than trainer.nonfinite_budget={self.nonfinite_budget}; lower optim.lr, "
                "lengthen optim.warmup_steps, or look at the data"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens, self._seconds_before = state_dict["tokens"], state_dict["seconds"]


class MetricsWriter(Callback):
    """Hands the finished row to every logger and clears it for the next step."""

    def __init__(self, row: dict[str, float]) -> None:
        self.row = row

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        if not self.row:
            return
        for logger in trainer.loggers:
            logger.log_metrics(dict(self.row), step=trainer.global_step)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StreamItem, batch_idx: int
    ) -> None:
        self.row.clear()  # only now: Progress reads the row after this callback's turn
