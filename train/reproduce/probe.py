"""The callback that measures a run of `train.fit`: it stands last, so that a step's logging is inside what it times.

In order: the warm steps, the matmul rate, the timed steps, the matmul rate again, the names of attention's kernels, and
for a budget one step under the profiler. The profiler comes last: once it was there, every launch takes longer.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from model.flops import exact_flops, sustained_matmul_flops
from train.callbacks.throughput import Throughput, synchronize
from train.datamodule import StreamItem
from train.module import GPTModule
from train.reproduce import budget
from train.reproduce.kernels import check_attention
from train.reproduce.monitor import Monitor

_COPIED_BYTES = 1 << 28  # beyond any cache, and still there where a run fills the memory


class Probe(Callback):
    """Measures the steps after the first `warm_steps`; `result` is complete when the run has ended.

    Args:
        attention: the backend whose kernels must run.
        warm_steps: steps before the clock starts.
        steps: timed steps.
        with_budget: profile one step more.
        started: when the run's process was begun, on the clock of `time.time`.
        say: hears what is done.

    Raises:
        ValueError: another backend's kernels ran, an `mfu` above 100%, or a step that was not finite.
    """

    def __init__(
        self,
        attention: str,
        warm_steps: int,
        steps: int,
        with_budget: bool,
        started: float,
        say: Callable[[str], None] = print,
    ) -> None:
        self.attention = attention
        self.warm_steps = warm_steps
        self.steps = steps
        self.with_budget = with_budget
        self.started = started
        self.say = say
        self.result: dict[str, Any] = {}
        self._marks: list[Any] = []  # before the timed steps, and after each but the last
        self._matmul_flops: list[float] = []
        self._tokens = self._sum_len_sq = 0
        self._stack = ExitStack()
        self._step_seconds: list[float] = []
        self._copy_rate = 0.0
        self.monitor = Monitor(None)
        self._profiler: profile | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = [c for c in trainer.callbacks if isinstance(c, Throughput)]  # type: ignore[attr-defined]
        assert len(found) == 1, "fit() measures throughput"
        self.throughput = found[0]
        self.throughput.warm_steps = self.warm_steps
        self.device = pl_module.device
        self.on_gpu = self.device.type == "cuda"
        self.monitor = Monitor(gpu_name_of_nvidia_smi(self.device))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: StreamItem, batch_idx: int
    ) -> None:
        self.result.setdefault("seconds_to_first_step", time.time() - self.started)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GPTModule), "fit() trains a GPT"
        step = trainer.global_step
        if step == 1:
            synchronize(self.device)
            self.result["seconds_to_first_step_done"] = time.time() - self.started
        if step > self.warm_steps + self.steps:
            self._end_profile()
            return
        if step > self.warm_steps:
            self._count(batch)
            if step < self.warm_steps + self.steps:
                self._mark()
        if step == self.warm_steps:
            with self.throughput.paused():
                self._before()
            self._mark()
        if step == self.warm_steps + self.steps:
            self._after()
            self.result["kernels"] = self._attention_kernels(trainer, pl_module, batch)
            if self.with_budget:
                self._begin_profile()

    def _before(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._measure_matmul()
        self.monitor.start()

    def _after(self) -> None:
        self.monitor.stop()
        if self.on_gpu:
            stats = {"peak": torch.cuda.max_memory_allocated, "reserved": torch.cuda.max_memory_reserved}
            self.result |= {f"{name}_memory_bytes": read(self.device) for name, read in stats.items()}
        self._measure_matmul()
        row = self.throughput.row
        total = self._tokens / row["tokens_per_s"]
        self._step_seconds = self._divide(total)
        exact = exact_flops(self.throughput.config, self._tokens, self._sum_len_sq) / total
        rate = statistics.mean(self._matmul_flops)
        self.result |= {
            "tokens_per_s": row["tokens_per_s"],
            "step_seconds": self._step_seconds,
            "mfu": row.get("mfu"),
            "mfu_exact": row.get("mfu_exact"),
            "gemm_util": exact / rate,
            "exact_tflops": exact / 1e12,
            "matmul_tflops": [flops / 1e12 for flops in self._matmul_flops],
            "peak_tflops": None if self.throughput.peak_flops is None else self.throughput.peak_flops / 1e12,
            "loss": row["loss"],
            "tokens": self._tokens,
            "sum_len_sq": self._sum_len_sq,
            "n_params": self.throughput.n_params,
            "gpu": self.monitor.summary(),
        }
        self._refuse_the_impossible(row)

    def _refuse_the_impossible(self, row: dict[str, float]) -> None:
        for key in ("mfu", "mfu_exact"):
            if row.get(key, 0.0) > 1.0:
                raise ValueError(
                    f"{key} must be at most 100%, got {row[key]:.0%}: trainer.peak_tflops or a FLOP count is wrong"
                )
        if row["skipped_steps"]:
            raise ValueError(f"skipped_steps must be 0, got {row['skipped_steps']:.0f}: a step was not finite")

    def _measure_matmul(self) -> None:
        t = self.throughput
        self._matmul_flops.append(sustained_matmul_flops(t.config, t.micro_batch_tokens, self.device, t.dtype))

    def _count(self, batch: StreamItem) -> None:
        self._tokens += batch.batch.n_tokens
        self._sum_len_sq += batch.batch.sum_len_sq

    def _mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _divide(self, total: float) -> list[float]:
        """Seconds of each timed step: Throughput's clock has their sum, host and device synchronised at both ends, and
        the marks their limits. (What the other callbacks do at a log point stands between that clock's end and here.)
        """
        pairs = zip(self._marks, self._marks[1:], strict=False)
        seconds = [a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs]
        return [*seconds, total - sum(seconds)]

    def _attention_kernels(self, trainer: Trainer, module: GPTModule, batch: StreamItem) -> list[str]:
        """Names of attention's kernels in one more micro-batch, forward and backward; checked."""
        micro_batch = batch.batch.micro_batches[0]
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            with trainer.precision_plugin.train_step_context():
                nats = module.nats(micro_batch)
            torch.autograd.grad(nats, module.model.embedding.weight)
            synchronize(self.device)
        wanted = DeviceType.CUDA if self.on_gpu else DeviceType.CPU
        ran = {event.name for event in profiler.events() or [] if event.device_type == wanted}
        return check_attention(self.attention, ran, self.on_gpu)

    def _begin_profile(self) -> None:
        self._copy_rate = _copy_bytes_per_second(self.device)
        synchronize(self.device)
        self._profiler = self._stack.enter_context(profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]))
        self._stack.enter_context(record_function(budget.STEP))

    def _end_profile(self) -> None:
        assert self._profiler is not None, "the step after the timed ones is profiled"
        synchronize(self.device)
        self._stack.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"), strict=False)
        self.result["budget"] = {
            **budget.read_trace(trace).as_record(),
            "copy_bytes_per_s": self._copy_rate,
            "timed_step_s": statistics.median(self._step_seconds),
        }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning would copy weights and moments, tens of GB, to the host; nobody wants them
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        for parameter in pl_module.parameters():
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.monitor.stop()  # after an error too
        self._stack.close()


def gpu_name_of_nvidia_smi(device: torch.device) -> str | None:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def _copy_bytes_per_second(device: torch.device, seconds: float = 0.2) -> float:
    """Bytes read and written a second by a large copy on the device: the slope of the roofline."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    start, copies = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or copies < 3:
        for _ in range(10):
            target.copy_(source)
        copies += 10
        synchronize(device)
    return 2 * _COPIED_BYTES * copies / (time.perf_counter() - start)
