"""Speed of training: tokens/s, mfu, mfu_exact and gemm_util, as `model/flops.py` defines them.

Time runs between two points at which the device has caught up with the host, once per log interval. Validation,
checkpoints and the first steps are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data.batch import StepBatch
from model.config import GPTConfig
from model.flops import device_peak_tflops, exact_flops, paper_flops, sustained_matmul_flops
from train.datamodule import StreamItem

# A compiled block is compiled in the first step, again when a shape or mode differs, and tuned in the next ones.
_WARM_STEPS = {False: 1, True: 5}

# gemm_util's rate is measured, so noise can carry it a little past 1; a datasheet peak cannot be passed.
_NOISE = 1.1


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Throughput(Callback):
    """Fills tokens_per_s, mfu, mfu_exact and gemm_util into the row of each log point.

    Args:
        row: the values of the current step, shared with the other callbacks.
        config: the model's shape.
        n_params: all parameters, for the paper's formula.
        micro_batch_tokens: rows of the model's matrix products, at which the sustained rate is measured.
        dtype: of those products.
        peak_tflops: dense datasheet peak of one device; None looks the device's name up.
        compiled: whether blocks compile in the first steps.
        log_every: steps of an interval.
        say: hears at the start what is measured, and one warning when an MFU is above 100%.
    """

    def __init__(
        self,
        row: dict[str, float],
        config: GPTConfig,
        n_params: int,
        micro_batch_tokens: int,
        dtype: torch.dtype,
        peak_tflops: float | None,
        compiled: bool,
        log_every: int,
        say: Callable[[str], None],
    ) -> None:
        self.row = row
        self.config = config
        self.n_params = n_params
        self.micro_batch_tokens = micro_batch_tokens
        self.dtype = dtype
        self.peak_flops = None if peak_tflops is None else peak_tflops * 1e12
        self.warm_steps = _WARM_STEPS[compiled]
        self.log_every = log_every
        self.say = say
        self.gemm_flops: float | None = None  # measured: FLOP/s of one device
        self._warned = self._measured_again = False
        self._steps_here = 0
        self._device = torch.device("cpu")
        self._restart()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = pl_module.device
        self.gemm_flops = sustained_matmul_flops(self.config, self.micro_batch_tokens, self._device, self.dtype)
        self._describe()

    def _describe(self) -> None:
        rate = f"speed: matrix products sustain {self.gemm_flops / 1e12:.3g} TFLOP/s here" if self.gemm_flops else ""
        if self.peak_flops is None and self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
            peak = device_peak_tflops(name)
            self.peak_flops = None if peak is None else peak * 1e12
            if peak is None:
                self.say(f"mfu: n/a, no datasheet peak is known for {name!r}; set trainer.peak_tflops to its dense one")
        self.say(
            f"{rate}; measured every {self.log_every} steps, without validation, checkpoints and the first "
            f"{self.warm_steps} step{'s' if self.warm_steps > 1 else ''}"
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        self._steps_here += 1
        if self._steps_here <= self.warm_steps:
            if self._steps_here == self.warm_steps:
                synchronize(self._device)
                self._restart()
            return
        self._count(batch.batch)
        if trainer.global_step % self.log_every == 0:
            self._fill_row(trainer.world_size)

    def _count(self, batch: StepBatch) -> None:
        self._tokens += batch.n_tokens
        self._sum_len_sq += batch.sum_len_sq

    def _restart(self) -> None:
        self._tokens = self._sum_len_sq = 0
        self._seconds_out = 0.0
        self._since = time.perf_counter()

    def _fill_row(self, devices: int) -> None:
        synchronize(self._device)
        seconds = time.perf_counter() - self._since - self._seconds_out
        config, tokens, sum_len_sq = self.config, self._tokens, self._sum_len_sq
        paper = paper_flops(self.n_params, config.n_layer, config.d_model, tokens, sum_len_sq) / seconds / devices
        exact = exact_flops(config, tokens, sum_len_sq) / seconds / devices
        self.row["tokens_per_s"] = tokens / seconds
        if self.peak_flops is not None:
            self.row["mfu"] = paper / self.peak_flops
            self.row["mfu_exact"] = exact / self.peak_flops
        if self.gemm_flops:
            if exact > _NOISE * self.gemm_flops and not self._measured_again:
                self._measure_again()
            self.row["gemm_util"] = exact / self.gemm_flops
        self._warn_above_one()
        self._restart()

    def _measure_again(self) -> None:
        """Once: the rate of start-up is impossibly low, because something else kept the device busy then."""
        self._measured_again = True
        rate = sustained_matmul_flops(self.config, self.micro_batch_tokens, self._device, self.dtype)
        if self.gemm_flops is not None and rate > self.gemm_flops:
            self.gemm_flops = rate
            self.say(f"speed: the device was busy at start-up; matrix products sustain {rate / 1e12:.3g} TFLOP/s")

    def _warn_above_one(self) -> None:
        suspects = {
            "mfu": (1.0, "more than the device can do: trainer.peak_tflops or the FLOP count is wrong"),
            "mfu_exact": (1.0, "more than the device can do: trainer.peak_tflops or the FLOP count is wrong"),
            "gemm_util": (_NOISE, "more than plain matrix products reached: other work disturbed their measurement"),
        }
        above = next((key for key, (limit, _) in suspects.items() if self.row.get(key, 0.0) > limit), None)
        if above is not None and not self._warned:
            self._warned = True
            self.say(f"WARNING: {above} is {self.row[above]:.0%}, {suspects[above][1]}. Do not quote this run's speed.")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the measured time."""
        synchronize(self._device)
        begin = time.perf_counter()
        try:
            yield
        finally:
            synchronize(self._device)
            self._seconds_out += time.perf_counter() - begin
