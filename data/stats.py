"""Figures about data, without a model: how full the micro-batches are, and what simple compressors reach."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from data.config import BatchConfig
from data.shards import TokenDataset
from data.stream import TrainStream


def packing_stats(dataset: TokenDataset, batch: BatchConfig, seed: int, steps: int) -> dict[str, Any]:
    """Plans `steps` optimiser steps of one rank's global batch and measures them; builds no tensors.

    Returns:
        fill: real tokens over tokens of the micro-batches, padding included. pieces_per_micro_batch: mean.
        continued_pieces: share of pieces that begin inside their document, so without its context.
        sum_len_sq_mean, _std, _max_over_min: of Σ len² over micro-batches, what attention costs in each.
        documents_cut, documents_truncated, documents_dropped, lost_targets: of one epoch.
    """
    # One rank takes the same bins as any number of ranks together.
    stream = TrainStream(dataset, batch, seed, eot_id=0)
    tokens, pieces, continued, squares = 0, 0, 0, []
    for _ in range(steps):
        for layout in stream.next_layouts():
            tokens += layout.n_tokens
            pieces += len(layout.ids)
            continued += int((layout.starts != dataset.starts[stream.pieces.documents[layout.ids]]).sum())
            squares.append(layout.sum_len_sq)
    spread = np.array(squares, dtype=np.float64)
    return {
        "packing": batch.packing.value,
        "long_documents": batch.long_documents.value,
        "context": batch.context,
        "micro_batch_tokens": batch.micro_batch_tokens,
        "micro_batches": len(squares),
        "fill": tokens / (len(squares) * batch.micro_batch_tokens),
        "pieces_per_micro_batch": pieces / len(squares),
        "continued_pieces": continued / pieces,
        "sum_len_sq_mean": float(spread.mean()),
        "sum_len_sq_std": float(spread.std()),
        "sum_len_sq_max_over_min": float(spread.max() / spread.min()),
        "documents": len(dataset),
        "documents_cut": stream.pieces.cut,
        "documents_truncated": stream.pieces.truncated,
        "documents_dropped": stream.pieces.dropped,
        "lost_targets": stream.pieces.lost_targets,
    }


def unigram_bits_per_byte(train: TokenDataset, validation: TokenDataset) -> float:
    """Bits per UTF-8 byte of the validation split under the training split's token frequencies.

    Counts the same targets as a model's loss does: every text token and each document's closing end of text. Add-one
    smoothing over the vocabulary; nan where ids stand for no text.
    """
    if not validation.n_bytes:
        return math.nan
    counts = _target_counts(train) + 1.0
    nats = -np.log(counts / counts.sum())
    return float(_target_counts(validation) @ nats / math.log(2) / validation.n_bytes)


def _target_counts(dataset: TokenDataset) -> np.ndarray:
    counts = np.zeros(dataset.vocab_size, dtype=np.int64)
    for shard in dataset.shards:
        for start in range(0, len(shard), 1 << 24):  # bincount widens its input to 8 bytes an id
            counts += np.bincount(shard[start : start + (1 << 24)], minlength=dataset.vocab_size)
    if len(dataset):
        counts[int(dataset.document(0)[0])] -= len(dataset)  # the opening end of text is never a target
    return counts


def gzip_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits per UTF-8 byte after `gzip -9` of the texts, joined; nan for no text."""
    joined = "".join(texts).encode()
    if not joined:
        return math.nan
    return 8 * len(gzip.compress(joined, compresslevel=9, mtime=0)) / len(joined)
