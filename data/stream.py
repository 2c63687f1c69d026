"""Bins to tensors: the endless training stream and the finite validation pass, each rank with its own share.

Every rank derives the whole plan (integers, cheap) and builds only its own micro-batches, so the counts that a loss or
a throughput is divided by need no reduction. Read next: `batch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from data.batch import StepBatch, VarlenBatch
from data.config import BatchConfig, LongDocuments, Packing
from data.packing import Bin, BinPlan, Pieces, cut_documents, finite_bins
from data.shards import TokenDataset

State = dict[str, Any]
IGNORED = -100


class _Layout:
    """A bin's pieces as arrays: where each is read, and how long it is."""

    def __init__(self, bin_: Bin, pieces: Pieces):
        self.ids = np.array(bin_.pieces, dtype=np.int64)
        self.starts, self.lengths, self.closed = (
            pieces.starts[self.ids],
            pieces.lengths[self.ids],
            pieces.closed[self.ids],
        )
        self.shards = pieces.shards[self.ids]
        if bin_.parts is not None:
            offsets, parts = np.array(bin_.parts, dtype=np.int64).reshape(-1, 2).T
            self.closed &= offsets + parts == self.lengths
            self.starts, self.lengths = self.starts + offsets, parts
        self.n_tokens = int(self.lengths.sum())
        self.sum_len_sq = int(self.lengths @ self.lengths)


class _Builder:
    """Makes the `VarlenBatch` of a bin. The three sizes are fixed for its life."""

    def __init__(self, dataset: TokenDataset, batch: BatchConfig, eot_id: int):
        self.shards, self.eot_id = dataset.shards, eot_id
        self.size, self.context, self.max_docs = batch.micro_batch_tokens, batch.context, batch.resolved_max_docs()
        self.padded_rows = batch.packing is Packing.pad
        self._range = np.arange(self.size, dtype=np.int32)

    def build(self, layout: _Layout | None) -> VarlenBatch:
        """Without a layout: padding only."""
        tokens = np.empty(self.size, dtype=np.int64)
        targets = np.empty(self.size, dtype=np.int64)
        positions = np.empty(self.size, dtype=np.int32)
        cu_seqlens = np.zeros(self.max_docs + 1, dtype=np.int32)
        end = 0
        if layout is not None and self.padded_rows:
            end = self._rows(layout, tokens, targets, positions, cu_seqlens)
        elif layout is not None:
            end = self._side_by_side(layout, tokens, targets, positions, cu_seqlens)
        tokens[end:] = self.eot_id
        targets[end:] = IGNORED
        positions[end:] = 0
        return VarlenBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            torch.from_numpy(positions),
            torch.from_numpy(cu_seqlens),
            self.context,
        )

    def _text(self, layout: _Layout) -> np.ndarray:
        # One slice a piece: copies of whole runs, faster than a gather of single ids.
        ranges = zip(layout.starts.tolist(), (layout.starts + layout.lengths).tolist(), strict=True)
        shards = self.shards
        if len(shards) == 1:
            shard = shards[0]
            return np.concatenate([shard[start:end] for start, end in ranges])
        return np.concatenate(
            [shards[s][start:end] for s, (start, end) in zip(layout.shards.tolist(), ranges, strict=True)]
        )

    def _last_targets(self, layout: _Layout) -> np.ndarray:
        """The id after each piece: end of text, or for a cut piece the next id of its document."""
        targets = np.full(len(layout.ids), self.eot_id, dtype=np.int64)
        for i in np.flatnonzero(~layout.closed):
            targets[i] = self.shards[layout.shards[i]][layout.starts[i] + layout.lengths[i]]
        return targets

    def _side_by_side(
        self, layout: _Layout, tokens: np.ndarray, targets: np.ndarray, positions: np.ndarray, cu_seqlens: np.ndarray
    ) -> int:
        ends = np.cumsum(layout.lengths)
        end = layout.n_tokens
        tokens[:end] = self._text(layout)
        targets[: end - 1] = tokens[1:end]
        targets[ends - 1] = self._last_targets(layout)
        begins = (ends - layout.lengths).astype(np.int32)
        np.subtract(self._range[:end], np.repeat(begins, layout.lengths), out=positions[:end])
        cu_seqlens[1 : len(ends) + 1] = ends
        cu_seqlens[len(ends) + 1 :] = end
        return end

    def _rows(
        self, layout: _Layout, tokens: np.ndarray, targets: np.ndarray, positions: np.ndarray, cu_seqlens: np.ndarray
    ) -> int:
        tokens[:], targets[:] = self.eot_id, IGNORED
        text, last_targets = self._text(layout), self._last_targets(layout)
        taken, boundaries = 0, [0]
        for row, n in enumerate(layout.lengths.tolist()):
            start = row * self.context
            if start > boundaries[-1]:
                boundaries.append(start)  # the padding of the row before, a document of its own
            tokens[start : start + n] = text[taken : taken + n]
            targets[start : start + n - 1] = text[taken + 1 : taken + n]
            targets[start + n - 1] = last_targets[row]
            taken += n
            boundaries.append(start + n)
        end = boundaries[-1]
        edges = np.array(boundaries)
        positions[:end] = self._range[:end] - np.repeat(edges[:-1], np.diff(edges))
        cu_seqlens[: len(edges)] = edges
        cu_seqlens[len(edges) :] = end
        return end


class TrainStream:
    """Endless iterator of (step, state): the optimiser steps of one rank, and where to go on after each.

    A stream made from a step's state gives bit-identical further steps. The state belongs to the global plan, not to a
    rank: another number of ranks may go on from it as long as a step keeps its tokens.

    Args:
        seed: decides the order of every epoch.
        eot_id: the id that begins and ends every document, and fills padding.
        state: as yielded with the last step that was taken, or None to start.

    Raises:
        ValueError: nothing to train on; the global batch is no multiple of the ranks' micro-batches; the state comes
            from other data or another batch layout.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        batch: BatchConfig,
        seed: int,
        eot_id: int,
        rank: int = 0,
        world_size: int = 1,
        state: State | None = None,
    ):
        assert 0 <= rank < world_size, "rank must be one of world_size ranks"
        self.dataset, self.rank, self.world_size = dataset, rank, world_size
        self.micro_batches = batch.micro_batches(world_size)
        self.pieces = cut_documents(dataset, batch)
        self.plan = BinPlan(self.pieces, batch, seed)
        self.step = 0
        self._builder = _Builder(dataset, batch, eot_id)
        self._layout_of_run = {
            "data": dataset.fingerprint,
            "documents": len(dataset),
            "seed": seed,
            "batch.context": batch.context,
            "batch.micro_batch_tokens": batch.micro_batch_tokens,
            "batch.global_batch_tokens": batch.global_batch_tokens,
            "batch.max_docs": batch.resolved_max_docs(),
            "batch.packing": batch.packing.value,
            "batch.long_documents": batch.long_documents.value,
            "batch.open_bins": batch.open_bins,
        }
        if state is not None:
            self._load(state)

    def __iter__(self) -> Iterator[tuple[StepBatch, State]]:
        return self

    def __next__(self) -> tuple[StepBatch, State]:
        layouts = self.next_layouts()
        step = StepBatch(
            [self._builder.build(layout) for layout in layouts[self.rank :: self.world_size]],
            n_targets=sum(layout.n_tokens for layout in layouts),  # inside real tokens every target is valid
            n_tokens=sum(layout.n_tokens for layout in layouts),
            sum_len_sq=sum(layout.sum_len_sq for layout in layouts),
        )
        return step, self.state()

    def next_layouts(self) -> list[_Layout]:
        """Plans one step without building it: the layouts of all ranks."""
        bins = self.plan.take(self.micro_batches * self.world_size)
        self.step += 1
        return [_Layout(bin_, self.pieces) for bin_ in bins]

    def state(self) -> State:
        return {"step": self.step, "run": dict(self._layout_of_run), "plan": self.plan.state()}

    def _load(self, state: State) -> None:
        for key, value in self._layout_of_run.items():
            if state["run"].get(key) != value:
                raise ValueError(f"{key} must be as in the checkpoint ({state['run'].get(key)!r}), got {value!r}")
        self.step = state["step"]
        self.plan.load(state["plan"])


def validation_steps(
    dataset: TokenDataset, batch: BatchConfig, eot_id: int, rank: int = 0, world_size: int = 1
) -> Iterator[StepBatch]:
    """Every document of the split once, in a fixed order: one micro-batch a rank and step.

    Documents are packed by best fit and long ones split, whatever `batch` says for training: every byte is counted,
    and runs that pack differently are comparable. Ranks without a bin at the end get padding only.
    """
    batch = replace(batch, packing=Packing.best_fit, long_documents=LongDocuments.split)
    pieces = cut_documents(dataset, batch)
    piece_bytes = _bytes_of_pieces(pieces, dataset)
    bins = finite_bins(pieces, batch)
    builder = _Builder(dataset, batch, eot_id)
    for first in range(0, len(bins), world_size):
        layouts = [_Layout(bin_, pieces) for bin_ in bins[first : first + world_size]]
        yield StepBatch(
            [builder.build(layouts[rank] if rank < len(layouts) else None)],
            n_targets=sum(layout.n_tokens for layout in layouts),
            n_tokens=sum(layout.n_tokens for layout in layouts),
            sum_len_sq=sum(layout.sum_len_sq for layout in layouts),
            n_bytes=sum(int(piece_bytes[layout.ids].sum()) for layout in layouts),
        )


def _bytes_of_pieces(pieces: Pieces, dataset: TokenDataset) -> np.ndarray:
    """A document's bytes, shared out by pairs so that they add up exactly."""
    pairs = dataset.lengths[pieces.documents] - 1
    before = np.cumsum(pieces.lengths) - pieces.lengths
    first = np.searchsorted(pieces.documents, pieces.documents, side="left")
    offsets = before - before[first]
    n_bytes = dataset.bytes[pieces.documents]
    return n_bytes * (offsets + pieces.lengths) // pairs - n_bytes * offsets // pairs
