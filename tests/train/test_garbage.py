"""No collection inside a step; cycles die at log points; the collector is afterwards what it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from train.callbacks.garbage import GarbageCollection


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def run(callback: GarbageCollection, steps: int) -> list[bool]:
    """Whether a cycle that each step leaves behind is alive after it."""
    alive: list[bool] = []
    for step in range(1, steps + 1):
        trainer: Any = SimpleNamespace(global_step=step)
        left = weakref.ref(Cycle())
        callback.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
        alive.append(left() is not None)
    return alive


def test_cycles_die_at_log_points_alone() -> None:
    callback = GarbageCollection(log_every=3)
    callback.on_train_start(None, None)  # type: ignore[arg-type]
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert run(callback, 7) == [True, True, False, True, True, False, True]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("ends", ["on_train_end", "on_exception"])
def test_the_collector_is_afterwards_what_it_was(enabled: bool, ends: str) -> None:
    callback = GarbageCollection(log_every=1)
    if not enabled:
        gc.disable()
    callback.on_train_start(None, None)  # type: ignore[arg-type]
    run(callback, 2)
    for _ in range(2):  # Lightning may call both
        getattr(callback, ends)(*[None] * (2 if ends == "on_train_end" else 3))
    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() == 0


def test_an_end_without_a_start_changes_nothing() -> None:
    gc.disable()
    GarbageCollection(log_every=1).on_exception(None, None, RuntimeError())  # type: ignore[arg-type]
    assert not gc.isenabled()
