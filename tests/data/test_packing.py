from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import BatchConfig, LongDocuments, Packing
from data.packing import PACKERS, PATIENCE, BestFit, BinPlan, cut_documents, epoch_order, finite_bins
from data.shards import TokenDataset
from data.stats import packing_stats


def dataset(pairs: list[int]) -> TokenDataset:
    """Documents of the given pairs; every id is unique but end of text (0), so that a token names its place."""
    documents, following = [], 1
    for n in pairs:
        documents.append([0, *range(following, following + n - 1), 0])
        following += n - 1
    return TokenDataset.from_documents(documents, vocab_size=following)


def config(context: int, rows: int = 1, **changes) -> BatchConfig:
    size = context * rows
    return BatchConfig(**{"context": context, "micro_batch_tokens": size, "global_batch_tokens": size, **changes})


def entries(bin_, pieces):
    """(document, offset in the document, pairs) of everything in a bin."""
    parts = bin_.parts or [(0, int(pieces.lengths[piece])) for piece in bin_.pieces]
    for piece, (offset, pairs) in zip(bin_.pieces, parts, strict=True):
        document = int(pieces.documents[piece])
        first = int(np.searchsorted(pieces.documents, document))
        yield document, int(pieces.starts[piece] - pieces.starts[first]) + offset, pairs


lengths = st.lists(st.integers(2, 60), min_size=1, max_size=60)


@given(lengths, st.integers(4, 24), st.integers(1, 3), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_finite_bins_show_every_pair_once(pairs, context, rows, open_bins, max_docs):
    batch = config(context, rows, open_bins=open_bins, max_docs=max_docs)
    data = dataset(pairs)
    pieces = cut_documents(data, batch)
    seen = Counter()
    for bin_ in finite_bins(pieces, batch):
        here = list(entries(bin_, pieces))
        assert 0 < len(here) <= max_docs
        assert sum(n for _, _, n in here) <= batch.micro_batch_tokens
        assert all(n <= context for _, _, n in here)
        seen.update((document, offset + i) for document, offset, n in here for i in range(n))
    assert seen == Counter({(d, i): 1 for d, n in enumerate(pairs) for i in range(n)})


@given(lengths, st.integers(4, 24), st.integers(1, 3), st.sampled_from(list(Packing)), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_endless_plan_shows_every_pair_once_an_epoch(pairs, context, rows, packing, seed):
    batch = config(context, rows, packing=packing, open_bins=3, max_docs=7)
    data = dataset(pairs)
    pieces = cut_documents(data, batch)
    plan = BinPlan(pieces, batch, seed)
    counts: Counter = Counter()
    while plan.epoch < 3:
        for bin_ in plan.take(2):
            here = list(entries(bin_, pieces))
            assert 0 < len(here) <= 7
            if packing is Packing.pad:
                assert len(here) <= rows
            assert sum(n for _, _, n in here) <= batch.micro_batch_tokens
            assert all(n <= context for _, _, n in here)
            counts.update((document, offset + i) for document, offset, n in here for i in range(n))
    # What is still waiting in open bins and what the current epoch has shown already make up the difference.
    state = plan.state()
    waiting: Counter = Counter()
    open_ = state["packer"].get("slots") or [state["packer"]["open"]]
    for saved in [s[0] for s in state["ready"]] + [s[0] if packing is Packing.concat else s for s in open_]:
        waiting.update(saved)
    shown = sum(counts.values())
    total = sum(pairs)
    in_epoch = int(pieces.lengths[plan._order[: state["cursor"]]].sum())
    if packing is not Packing.concat:
        held = sum(int(pieces.lengths[piece]) * count for piece, count in waiting.items())
        assert shown + held == plan.epoch * total + in_epoch
    wanted = {(d, i) for d, n in enumerate(pairs) for i in range(n)}
    assert set(counts) <= wanted
    assert max(counts.values()) <= plan.epoch + 1


def test_concat_epoch_is_exact_without_open_bins():
    # 12 documents of 5 pairs in rows of 6: ten rows an epoch, nothing left over.
    batch = config(6, packing=Packing.concat)
    pieces = cut_documents(dataset([5] * 12), batch)
    plan = BinPlan(pieces, batch, seed=3)
    for _ in range(3):
        seen = Counter()
        for bin_ in plan.take(10):
            here = list(entries(bin_, pieces))
            assert sum(n for _, _, n in here) == 6
            seen.update((d, offset + i) for d, offset, n in here for i in range(n))
        assert seen == Counter({(d, i): 1 for d in range(12) for i in range(5)})


@given(lengths, st.integers(4, 24), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_best_fit_is_the_best_fit(pairs, context, rows, open_bins, max_docs):
    """Against the rule spelled out: a list of open bins, searched one by one."""
    batch = config(context, rows, open_bins=open_bins, max_docs=max_docs)
    pieces = cut_documents(dataset(pairs), batch)
    open_: list[tuple[int, list[int]]] = []  # (room, contents)
    closed: list[list[int]] = []
    for piece, n in enumerate(pieces.lengths.tolist()):
        fitting = [entry for entry in open_ if entry[0] >= n]
        if fitting:
            room = min(entry[0] for entry in fitting)
            candidates = [entry for entry in fitting if entry[0] == room]
        else:
            if len(open_) == open_bins:
                least = min(entry[0] for entry in open_)
                fullest = [entry for entry in open_ if entry[0] == least]
                if len(fullest) > 1:
                    return  # equally full bins: which one goes first is the implementation's choice
                open_.remove(fullest[0])
                closed.append(fullest[0][1])
            candidates = [(batch.micro_batch_tokens, [])]
        if len(candidates) > 1:
            return
        if fitting:
            open_.remove(candidates[0])
        room, contents = candidates[0][0] - n, [*candidates[0][1], piece]
        if room and len(contents) < max_docs:
            open_.append((room, contents))
        else:
            closed.append(contents)
    bins: list = []
    BestFit(batch).place(enumerate(pieces.lengths.tolist()), bins, len(pieces) + 1)
    assert [bin_.pieces for bin_ in bins] == closed


def test_no_bin_waits_for_ever():
    # The first document's bin fits nothing that comes after it.
    batch = config(64, open_bins=2)
    pieces = cut_documents(dataset([10] + [64] * 200), batch)
    bins: list = []
    BestFit(batch).place(enumerate(pieces.lengths.tolist()), bins, len(pieces) + 1)
    place = [bin_.pieces for bin_ in bins].index([0])
    assert PATIENCE * 2 - 2 <= place <= PATIENCE * 2


def test_fill_of_short_documents_is_above_99_6_percent():
    rng = np.random.default_rng(0)
    data = dataset(rng.integers(32, 253, 6000).tolist())
    batch = config(2048, 2, max_docs=256)
    assert packing_stats(data, batch, seed=1, steps=150)["fill"] > 0.996


def test_long_document_policies():
    data = dataset([10, 4, 25, 8])
    split = cut_documents(data, config(8))
    assert split.documents.tolist() == [0, 0, 1, 2, 2, 2, 2, 3]
    assert split.lengths.tolist() == [8, 2, 4, 8, 8, 8, 1, 8]
    assert (split.cut, split.truncated, split.dropped, split.lost_targets) == (2, 0, 0, 0)
    truncate = cut_documents(data, config(8, long_documents=LongDocuments.truncate))
    assert truncate.lengths.tolist() == [8, 4, 8, 8]
    assert (truncate.truncated, truncate.lost_targets) == (2, 2 + 17)
    drop = cut_documents(data, config(8, long_documents=LongDocuments.drop))
    assert drop.documents.tolist() == [1, 3]
    assert (drop.dropped, drop.lost_targets) == (2, 35)
    assert split.closed.tolist() == [False, True, True, False, False, False, True, True]
    assert truncate.closed.tolist() == [False, True, False, True]
    assert drop.closed.all()


@pytest.mark.parametrize("packing", list(Packing))
def test_nothing_left_is_an_error_and_no_endless_loop(packing: Packing):
    batch = config(8, packing=packing, long_documents=LongDocuments.drop)
    with pytest.raises(ValueError, match=r"batch\.long_documents must leave documents.*'drop' with all 2 longer than"):
        cut_documents(dataset([9, 10]), batch)
    with pytest.raises(ValueError, match="at least one document, got an empty dataset"):
        cut_documents(dataset([]), batch)


def test_pad_needs_room_for_its_padding():
    with pytest.raises(ValueError, match=r"batch\.max_docs must be at least 7 .* got 6"):
        PACKERS[Packing.pad](config(8, 4, packing=Packing.pad, max_docs=6))
    PACKERS[Packing.pad](config(8, 4, packing=Packing.pad, max_docs=7))


def test_epoch_order_is_a_permutation_pinned_for_ever():
    assert epoch_order(10, 1234, 0).tolist() == [2, 3, 5, 6, 4, 0, 9, 1, 7, 8]
    assert epoch_order(10, 1234, 1).tolist() == [4, 7, 3, 9, 2, 0, 8, 1, 6, 5]
    orders = [epoch_order(1000, seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    assert all(sorted(order.tolist()) == list(range(1000)) for order in orders)
    assert all((a != b).sum() > 900 for i, a in enumerate(orders) for b in orders[:i])


def test_shuffle_is_uniform_enough():
    # Mean displacement of a uniform permutation of n is n / 3.
    order = epoch_order(30_000, 7, 0)
    assert abs(np.abs(order - np.arange(30_000)).mean() / 10_000 - 1) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
