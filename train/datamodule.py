"""The data room's streams as Lightning wants them; a position in the stream belongs to a step that was consumed.

Must not know packing or tokenizers. Read next: `data/stream.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule

from data.batch import StepBatch
from data.config import BatchConfig

if TYPE_CHECKING:
    from data.prepare import Prepared

_PREFETCHED_STEPS = 2


class StreamItem:
    """One optimiser step and the stream's position after it.

    No dataclass: Lightning's precision plugins rebuild those field by field, and refuse frozen ones.
    """

    __slots__ = ("batch", "state")

    def __init__(self, batch: StepBatch, state: dict[str, Any]) -> None:
        self.batch = batch
        self.state = state


class PackedDataModule(LightningDataModule):
    """An endless training stream and a finite validation pass over prepared token shards.

    Args:
        prepared: shards of both splits, and their tokenizer.
        batch: sizes and packing.
        seed: of the documents' order.
        pin: build batches in a background thread, in pinned memory (CUDA).
        overfit_one_batch: repeat the stream's first step.
    """

    def __init__(
        self, prepared: Prepared, batch: BatchConfig, seed: int, pin: bool = False, overfit_one_batch: bool = False
    ) -> None:
        super().__init__()
        self.prepared = prepared
        self.batch = batch
        self.seed = seed
        self.pin = pin
        self.overfit_one_batch = overfit_one_batch
        self.consumed_state: dict[str, Any] | None = None  # after the last step that was trained on
        self._prefetcher: Prefetcher | None = None

    def train_dataloader(self) -> Iterator[StreamItem]:
        if not self.pin:
            return self._items()
        self._prefetcher = Prefetcher(self._items(), _PREFETCHED_STEPS)
        return self._prefetcher

    def teardown(self, stage: str) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _items(self) -> Iterator[StreamItem]:
        from data.stream import TrainStream

        trainer = self.trainer
        assert trainer is not None, "Lightning attaches the trainer before it asks for data"
        stream = TrainStream(
            self.prepared.train,
            self.batch,
            self.seed,
            self.prepared.tokenizer.eot_id,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            state=None if self.overfit_one_batch else self.consumed_state,
        )
        for batch, state in stream:
            item = StreamItem(batch.pin_memory() if self.pin else batch, state)
            yield item
            while self.overfit_one_batch:
                yield item

    def validation_steps(self) -> Iterator[StepBatch]:
        """One pass over the validation split, this rank's share of it, always in the same order."""
        from data.stream import validation_steps

        trainer = self.trainer
        assert trainer is not None, "Lightning attaches the trainer before it validates"
        yield from validation_steps(
            self.prepared.validation,
            self.batch,
            self.prepared.tokenizer.eot_id,
            trainer.global_rank,
            trainer.world_size,
        )

    def transfer_batch_to_device(self, batch: StreamItem, device: torch.device, dataloader_idx: int) -> StreamItem:
        return StreamItem(batch.batch.to(device, non_blocking=self.pin), batch.state)

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.consumed_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed_state = state_dict["stream"]


class Prefetcher(Iterator[StreamItem]):
    """Items made ahead of time by a background thread; an error there is raised here, at its place in the order."""

    def __init__(self, items: Iterator[StreamItem], ahead: int) -> None:
        self._queue: queue.Queue[StreamItem | BaseException] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True, name="batches")
        self._thread.start()

    def _fill(self, items: Iterator[StreamItem]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:
            self._put(error)

    def _put(self, item: StreamItem | BaseException) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> StreamItem:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # an exhausted iterator stays exhausted
            raise item
        return item

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stopped.set()
        self._thread.join()
