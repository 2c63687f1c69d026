"""Which document pieces share a micro-batch: an endless, seeded plan of bins, and the three ways to fill one.

A document of n ids gives n - 1 (input, target) pairs. Documents longer than the context become pieces, every epoch
shuffles the pieces, and a packer places them in that order. Everything here is integers: no token is read.
Read next: `stream.py`, which turns a bin into a `VarlenBatch`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np

from data.config import BatchConfig, LongDocuments, Packing
from data.shards import TokenDataset

PATIENCE = 16  # best fit: a bin waits while this many times open_bins younger ones open; costs 0.1% of fill at most
CHUNK = 4096  # pieces whose lengths become Python integers at once
Arrivals = Iterator[tuple[int, int]]  # (piece, its pairs)


@dataclass(frozen=True)
class Pieces:
    """The pieces of all documents, in document order. A piece of n pairs reads ids [start, start + n] of its shard."""

    documents: np.ndarray  # (pieces,) int64
    shards: np.ndarray  # (pieces,) int32
    starts: np.ndarray  # (pieces,) int64, in the shard
    lengths: np.ndarray  # (pieces,) int64, pairs
    closed: np.ndarray  # (pieces,) bool, the piece ends where its document does
    cut: int = 0  # documents cut into pieces
    truncated: int = 0  # documents that lost their end
    dropped: int = 0  # documents left out
    lost_targets: int = 0  # targets of truncated and dropped documents that no epoch shows

    def __len__(self) -> int:
        return len(self.lengths)


def cut_documents(dataset: TokenDataset, batch: BatchConfig) -> Pieces:
    """Applies `batch.long_documents` to every document.

    Raises:
        ValueError: the dataset is empty, or the policy leaves nothing of it.
    """
    pairs = dataset.lengths - 1
    if not len(pairs):
        raise ValueError("data must hold at least one document, got an empty dataset")
    documents = np.arange(len(pairs), dtype=np.int64)
    is_long = pairs > batch.context
    n_long = int(is_long.sum())
    offsets = np.zeros_like(documents)
    lengths = pairs
    facts: dict[str, int] = {}
    if batch.long_documents is LongDocuments.drop:
        documents, offsets, lengths = documents[~is_long], offsets[~is_long], pairs[~is_long]
        facts = {"dropped": n_long, "lost_targets": int(pairs[is_long].sum())}
        if not len(documents):
            raise ValueError(
                f"batch.long_documents must leave documents to train on, got 'drop' with all {len(pairs)} longer than "
                f"batch.context={batch.context}"
            )
    elif batch.long_documents is LongDocuments.truncate:
        lengths = np.minimum(pairs, batch.context)
        facts = {"truncated": n_long, "lost_targets": int((pairs - lengths).sum())}
    elif batch.packing is not Packing.concat:  # concat cuts where its rows end, and nowhere else
        count = -(-pairs // batch.context)
        documents = np.repeat(documents, count)
        offsets = (np.arange(len(documents)) - np.repeat(np.cumsum(count) - count, count)) * batch.context
        lengths = np.minimum(pairs[documents] - offsets, batch.context)
        facts = {"cut": n_long}
    return Pieces(
        documents,
        dataset.shard_of[documents],
        dataset.starts[documents] + offsets,
        lengths,
        offsets + lengths == pairs[documents],
        **facts,
    )


class Bin(NamedTuple):
    """The contents of one micro-batch. Without parts, every piece is whole."""

    pieces: list[int]
    parts: list[tuple[int, int]] | None = None  # concat: offset in the piece and pairs, for each entry


class BestFit:
    """Each piece goes where it leaves the least room, among `open_bins` bins; the fullest makes way for a new one.

    A bin whose room nothing fits would wait for ever while fuller ones come and go, and its documents with it: after
    `PATIENCE * open_bins` younger bins it is closed as it is. `_keys` holds (room << bits | slot) of the open bins,
    sorted, so the best fit is one bisection.
    """

    def __init__(self, batch: BatchConfig):
        self.capacity = batch.micro_batch_tokens
        self.max_docs = batch.resolved_max_docs()
        self.max_age = PATIENCE * batch.open_bins
        self.bits = batch.open_bins.bit_length()
        self._keys: list[int] = []
        self._slots: list[list[int]] = [[] for _ in range(batch.open_bins)]
        self._unused = list(range(batch.open_bins))
        self._births: dict[int, int] = {}  # slot -> number of the bin in it, oldest first
        self._opened = 0

    def place(self, arrivals: Arrivals, ready: list[Bin], want: int) -> None:
        """Takes arrivals until `ready` holds `want` full bins, or none arrive any more."""
        keys, slots = self._keys, self._slots
        bits, mask = self.bits, (1 << self.bits) - 1
        max_docs = self.max_docs
        if len(ready) >= want:
            return
        for piece, pairs in arrivals:
            needed = pairs << bits
            i = bisect_left(keys, needed)
            if i < len(keys):
                key = keys.pop(i) - needed
                slot = key & mask
                contents = slots[slot]
                contents.append(piece)
                if key > mask and len(contents) < max_docs:
                    insort(keys, key, 0, i)
                    continue
                self._close(slot, ready)
            else:
                self._open(piece, pairs, ready)
            if len(ready) >= want:
                return

    def _open(self, piece: int, pairs: int, ready: list[Bin]) -> None:
        mask = (1 << self.bits) - 1
        oldest = next(iter(self._births), None)
        if oldest is not None and self._opened - self._births[oldest] >= self.max_age:
            self._keys.remove(next(key for key in self._keys if key & mask == oldest))
            self._close(oldest, ready)
        elif not self._unused:
            self._close(self._keys.pop(0) & mask, ready)
        slot = self._unused.pop()
        self._slots[slot].append(piece)
        self._births[slot] = self._opened
        self._opened += 1
        if pairs < self.capacity and self.max_docs > 1:
            insort(self._keys, (self.capacity - pairs) << self.bits | slot)
        else:
            self._close(slot, ready)

    def _close(self, slot: int, ready: list[Bin]) -> None:
        ready.append(Bin(self._slots[slot]))
        self._slots[slot] = []
        self._unused.append(slot)
        del self._births[slot]

    def flush(self) -> list[Bin]:
        """Closes all open bins, the fullest first."""
        bins: list[Bin] = []
        for key in self._keys:
            self._close(key & ((1 << self.bits) - 1), bins)
        self._keys.clear()
        return bins

    def state(self) -> dict[str, Any]:
        return {
            "slots": [list(contents) for contents in self._slots],
            "unused": list(self._unused),
            "births": [[slot, number] for slot, number in self._births.items()],
            "opened": self._opened,
        }

    def load(self, state: dict[str, Any], lengths: np.ndarray) -> None:
        self._slots = [list(contents) for contents in state["slots"]]
        self._unused = list(state["unused"])
        self._births = dict(state["births"])
        self._opened = state["opened"]
        self._keys = sorted(
            (self.capacity - int(lengths[contents].sum())) << self.bits | slot
            for slot, contents in enumerate(self._slots)
            if contents
        )


class Concat:
    """Documents side by side in arrival order, cut wherever a row of `context` pairs ends."""

    def __init__(self, batch: BatchConfig):
        self.context, self.capacity = batch.context, batch.micro_batch_tokens
        self.max_docs = batch.resolved_max_docs()
        self._open = Bin([], [])
        self._used = 0

    def place(self, arrivals: Arrivals, ready: list[Bin], want: int) -> None:
        if len(ready) >= want:
            return
        for piece, pairs in arrivals:
            offset = 0
            while offset < pairs:
                part = min(pairs - offset, self.context - self._used % self.context)
                self._open.pieces.append(piece)
                assert self._open.parts is not None
                self._open.parts.append((offset, part))
                offset += part
                self._used += part
                if self._used == self.capacity or len(self._open.pieces) == self.max_docs:
                    ready.append(self._open)
                    self._open, self._used = Bin([], []), 0
            if len(ready) >= want:
                return

    def state(self) -> dict[str, Any]:
        return {"open": _bin_state(self._open)}

    def load(self, state: dict[str, Any], lengths: np.ndarray) -> None:
        self._open = _bin_from_state(state["open"])
        self._used = sum(part for _, part in self._open.parts or ())


class Pad:
    """One piece a row of `context`; what a row lacks is padding."""

    def __init__(self, batch: BatchConfig):
        self.rows = batch.micro_batch_tokens // batch.context
        segments = 2 * self.rows - 1  # the last row's padding lies past cu_seqlens[-1]
        if batch.resolved_max_docs() < segments:
            raise ValueError(
                f"batch.max_docs must be at least {segments} (a piece and its padding for each row of batch.context) "
                f"for batch.packing=pad, got {batch.resolved_max_docs()}"
            )
        self._open: list[int] = []

    def place(self, arrivals: Arrivals, ready: list[Bin], want: int) -> None:
        if len(ready) >= want:
            return
        for piece, _ in arrivals:
            self._open.append(piece)
            if len(self._open) == self.rows:
                ready.append(Bin(self._open))
                self._open = []
                if len(ready) >= want:
                    return

    def state(self) -> dict[str, Any]:
        return {"open": list(self._open)}

    def load(self, state: dict[str, Any], lengths: np.ndarray) -> None:
        self._open = list(state["open"])


Packer = BestFit | Concat | Pad
PACKERS: dict[Packing, type[BestFit] | type[Concat] | type[Pad]] = {
    Packing.best_fit: BestFit,
    Packing.concat: Concat,
    Packing.pad: Pad,
}


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of n that depends on nothing but (n, seed, epoch): no library's generator, no platform.

    Sorts indices by splitmix64, which is a bijection: no two keys are equal, whatever the sort.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    key = _mix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch)
    keys = _mix(np.arange(n, dtype=np.uint64) ^ _mix(key))
    return np.argsort(keys)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class BinPlan:
    """The endless sequence of bins of a training run: the same on every rank, and resumable between any two calls.

    Bins that are open at the end of an epoch stay open into the next, so no epoch ends in half-empty micro-batches.
    """

    pieces: Pieces
    batch: BatchConfig
    seed: int
    packer: Packer = field(init=False)
    epoch: int = 0
    _ready: list[Bin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.packer = PACKERS[self.batch.packing](self.batch)
        self._start_epoch(0, 0)

    def take(self, n: int) -> list[Bin]:
        """The next n bins."""
        while True:
            self.packer.place(self._arrivals, self._ready, n)
            if len(self._ready) >= n:
                break
            self._next_chunk()
        taken, self._ready = self._ready[:n], self._ready[n:]
        return taken

    def state(self) -> dict[str, Any]:
        """Lists and integers only: what `load` needs to go on with the next bin."""
        return {
            "epoch": self.epoch,
            "cursor": self._chunk_end - length_hint(self._chunk),
            "ready": [_bin_state(bin_) for bin_ in self._ready],
            "packer": self.packer.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._start_epoch(state["epoch"], state["cursor"])
        self._ready = [_bin_from_state(saved) for saved in state["ready"]]
        self.packer.load(state["packer"], self.pieces.lengths)

    def _start_epoch(self, epoch: int, cursor: int) -> None:
        self.epoch = epoch
        self._order = epoch_order(len(self.pieces), self.seed, epoch)
        self._set_chunk(cursor)

    def _next_chunk(self) -> None:
        if self._chunk_end == len(self._order):
            self._start_epoch(self.epoch + 1, 0)
        else:
            self._set_chunk(self._chunk_end)

    def _set_chunk(self, start: int) -> None:
        ids = self._order[start : start + CHUNK]
        self._chunk_end = start + len(ids)
        # The iterator's own remaining count is the cursor, so placing a piece counts nothing.
        self._chunk = iter(ids.tolist())
        self._arrivals: Arrivals = zip(self._chunk, self.pieces.lengths[ids].tolist())  # noqa: B905


def finite_bins(pieces: Pieces, batch: BatchConfig) -> list[Bin]:
    """Every piece once, in document order, best fit; what stays open at the end is closed as it is."""
    packer = BestFit(batch)
    bins: list[Bin] = []
    arrivals: Iterable[tuple[int, int]] = enumerate(pieces.lengths.tolist())
    packer.place(iter(arrivals), bins, len(pieces) + 1)
    return bins + packer.flush()


def _bin_state(bin_: Bin) -> list[Any]:
    return [list(bin_.pieces), None if bin_.parts is None else [list(part) for part in bin_.parts]]


def _bin_from_state(state: list[Any]) -> Bin:
    pieces, parts = state
    return Bin(list(pieces), None if parts is None else [(offset, pairs) for offset, pairs in parts])
