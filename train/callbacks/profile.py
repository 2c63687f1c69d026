"""A torch profiler trace of a few steps, to be opened in Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, schedule

from train.datamodule import StreamItem

_WARM, _ACTIVE = 2, 3


class Profile(Callback):
    """Writes `profile/trace.json` and `profile/table.txt` after `skip` + 2 + 3 steps; the traced steps are slower."""

    def __init__(self, run_dir: Path, skip: int, say: Callable[[str], None]) -> None:
        self.folder = run_dir / "profile"
        self.skip = skip
        self.say = say
        self._profiler: profile | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        activities = [ProfilerActivity.CPU]
        if pl_module.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # A run shorter than that is traced whole, its first step aside.
        left = int(trainer.max_steps) - trainer.global_step
        fits = left >= self.skip + _WARM + _ACTIVE
        plan = schedule(wait=self.skip, warmup=_WARM, active=_ACTIVE, repeat=1) if fits else None
        self._profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write, record_shapes=True)
        self._profiler.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)

    def _write(self, profiler: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json"))
        by = "self_cuda_time_total" if torch.cuda.is_initialized() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=40)
        (self.folder / "table.txt").write_text(table, encoding="utf-8")
        self.say(f"profile: {self.folder / 'trace.json'} (open it in https://ui.perfetto.dev) and table.txt")
