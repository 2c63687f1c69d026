"""One optimiser step of a GPT under Lightning: the micro-batches of one loader item, then clip and step.

Nothing here reads a value back from the device; `StepStatistics.read` is the one place that does, called between
steps. Must not know files, configs of other rooms or printing. Read next: `optim.py`, `datamodule.py`, `fit.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from data.batch import StepBatch, VarlenBatch
from model.linear import WeightCopies
from train.datamodule import StreamItem
from train.optim import (
    apply_hyperparameters,
    build_adamw,
    gradient_norm,
    guard_step,
    learning_rate,
    set_learning_rate,
)
from train.schema import OptimConfig

if TYPE_CHECKING:
    from model.gpt import GPT


@dataclass(frozen=True)
class Interval:
    """What the host learns of the steps since the last reading."""

    loss: float  # mean over the interval's finite steps, nats per target; NaN if there was none
    grad_norm: float  # of the last step, before clipping
    skipped_steps: int  # non-finite steps of the whole run so far


class StepStatistics:
    """Counters that live on the device, so that a step never waits for the host."""

    _LOSS_SUM, _FINITE_STEPS, _GRAD_NORM, _SKIPPED = range(4)

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(4, dtype=torch.float64, device=device)

    def update(self, loss: Tensor, grad_norm: Tensor, found_inf: Tensor) -> None:
        finite = 1.0 - found_inf
        self.values[self._LOSS_SUM] += torch.where(found_inf == 0, loss.double(), 0.0)
        self.values[self._FINITE_STEPS] += finite
        self.values[self._GRAD_NORM] = grad_norm
        self.values[self._SKIPPED] += found_inf

    def read(self) -> Interval:
        """Wait for the device, report the interval and begin the next one."""
        loss_sum, finite_steps, norm, skipped = self.values.tolist()
        self.values[self._LOSS_SUM] = 0.0
        self.values[self._FINITE_STEPS] = 0.0
        return Interval(loss_sum / finite_steps if finite_steps else float("nan"), norm, int(skipped))

    def state(self) -> list[float]:
        return self.values.tolist()

    def load(self, state: list[float]) -> None:
        self.values.copy_(torch.tensor(state, dtype=torch.float64))


class GPTModule(LightningModule):
    """A GPT, its optimiser and the step between them; batch, optimiser step and global_step are the same count.

    The loss of a step is Σ nats / Σ targets over all its micro-batches and ranks. A step that is not finite leaves
    weights and optimiser untouched, but counts: the data stream and the schedule go on.

    Args:
        model: trained in place.
        optim: optimiser and schedule.
        max_steps: of the run, where the schedule ends.
        copy_dtype: products run from copies of the weights in this dtype, made once a step, and add weight gradients
            up in fp32; on one rank. None leaves casts and gradients to autocast and autograd.
    """

    def __init__(self, model: GPT, optim: OptimConfig, max_steps: int, copy_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.optim = optim
        self.max_steps = max_steps
        self.copy_dtype = copy_dtype
        self._copies: WeightCopies | None = None
        self._counters: list[float] | None = None  # from a checkpoint, until there is a device to put them on

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_adamw(self.model, self.optim)

    def on_fit_start(self) -> None:
        self.statistics = StepStatistics(self.device)

    def on_train_start(self) -> None:
        if self._counters is not None:
            self.statistics.load(self._counters)
        apply_hyperparameters(self._optimizer, self.optim)
        if self.copy_dtype is not None:  # only now: a checkpoint's weights are in, on their device
            self._copies = WeightCopies(self.model, self.copy_dtype)

    def on_train_end(self) -> None:
        if self._copies is not None:
            self._copies.release()
            self._copies = None

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer), "one optimiser"
        return optimizer

    def training_step(self, item: StreamItem, batch_idx: int) -> None:
        optimizer = self._optimizer
        set_learning_rate(optimizer, learning_rate(self.global_step, self.optim, self.max_steps))
        loss = self._backward(item.batch)
        norm = gradient_norm(optimizer)
        found_inf = guard_step(optimizer, loss, norm, self.optim.clip_grad_norm)
        self.optimizers().step()  # type: ignore[union-attr]  # Lightning's wrapper counts global_step
        if self._copies is None:
            optimizer.zero_grad()
        else:
            self._copies.refresh()
            self._copies.zero_gradients()
        self.statistics.update(loss, norm, found_inf)

    def _backward(self, batch: StepBatch) -> Tensor:
        """Accumulate the step's gradients; returns its loss over all ranks, () on the device."""
        ranks = self.trainer.world_size
        loss = torch.zeros((), device=self.device)
        last = len(batch.micro_batches) - 1
        for i, micro_batch in enumerate(batch.micro_batches):
            nats = self.nats(micro_batch)
            with (
                self._gradients_stay_local() if i < last else nullcontext(),
                torch.autocast(self.device.type, enabled=False),  # autocast is for the forward pass alone
            ):
                # DDP averages the ranks' gradients; times `ranks`, they are the sum that the global mean needs.
                self.manual_backward(nats * (ranks / batch.n_targets))
            loss = loss + nats.detach() / batch.n_targets
        return self._sum_over_ranks(loss)

    def nats(self, batch: VarlenBatch) -> Tensor:
        """() sum of nats over the micro-batch's valid targets."""
        return self.model.loss(batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, batch.max_seqlen)

    def _gradients_stay_local(self) -> Any:
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        return self.trainer.strategy.reduce(value, reduce_op="sum")

    def validation_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """() sum of nats over this rank's share of a validation item, fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro_batch in batch.micro_batches:
            total += self.nats(micro_batch)
        return total

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counters"] = self.statistics.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._counters = checkpoint["counters"]
