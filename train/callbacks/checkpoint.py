"""Saves everything that an exact resume needs, between steps: every `every` steps, at the end, and when asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from train.callbacks.throughput import Throughput
from train.checkpoint import checkpoint_path, list_checkpoints
from train.datamodule import PackedDataModule, StreamItem
from train.metrics import wandb_run_id


class Checkpoint(Callback):
    """Writes `checkpoints/step_NNNNNN.ckpt` and keeps the newest ones.

    Args:
        run_dir: the run's directory.
        every: steps between two files; a kill loses at most this many.
        keep: newest files kept besides the final one.
        identity: configuration and fingerprints, stored under their own keys.
        throughput: its clock stands still meanwhile.
        seed: of a fresh run's generators, and of a resumed one's where the number of ranks has changed.
        say: hears when generators could not be restored.
    """

    def __init__(
        self,
        run_dir: Path,
        every: int,
        keep: int,
        identity: dict[str, Any],
        throughput: Throughput,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.run_dir = run_dir
        self.every = every
        self.keep = keep
        self.identity = identity
        self.throughput = throughput
        self.seed = seed
        self.say = say
        self.saved_step: int | None = None
        self._rng_states: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Last of what happens before the first step: whatever start-up drew (weights, measurements) is forgotten.
        seed_generators(self.seed + trainer.global_rank)
        if self._rng_states is None:
            return
        if len(self._rng_states) == trainer.world_size:
            restore_generators(self._rng_states[trainer.global_rank])
        else:
            self.say("resume: another number of ranks, so random number generators (dropout) start anew")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: StreamItem, batch_idx: int
    ) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, PackedDataModule), "fit() attaches the data module"
        data.consumed_state = batch.state
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self.save(trainer)

    def save(self, trainer: Trainer) -> Path:
        """Save the state after the step just taken, once; on all ranks together."""
        path = checkpoint_path(self.run_dir, trainer.global_step)
        if self.saved_step != trainer.global_step:
            with self.throughput.paused():
                trainer.save_checkpoint(path, weights_only=False)
            self.saved_step = trainer.global_step
            if trainer.is_global_zero:
                self._remove_old(final=trainer.global_step == trainer.max_steps)
        return path

    def _remove_old(self, final: bool) -> None:
        for path in list_checkpoints(self.run_dir)[self.keep + final :]:
            path.unlink(missing_ok=True)
        for path in (self.run_dir / "checkpoints").glob(".step_*.partial"):
            path.unlink(missing_ok=True)  # left by a kill in the middle of a save

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.identity)
        checkpoint["wandb_run_id"] = wandb_run_id(trainer.loggers)
        checkpoint["rng_states"] = _of_all_ranks(trainer, generator_states())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._rng_states = checkpoint["rng_states"]
        self.saved_step = checkpoint["global_step"]


def _of_all_ranks(trainer: Trainer, value: Any) -> list[Any]:
    if trainer.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> dict[str, Any]:
    """States of Python's, numpy's, torch's CPU and CUDA generators, as plain values and tensors."""
    name, keys, position, has_gauss, gauss = cast(tuple[str, Any, int, int, float], np.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), int(position), int(has_gauss), float(gauss)),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore_generators(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
