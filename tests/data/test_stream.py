from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import StepBatch, VarlenBatch
from data.config import BatchConfig, LongDocuments, Packing
from data.shards import TokenDataset
from data.stream import TrainStream, validation_steps

EOT = 0
PINNED = "52773867b61336d9e52d6209bbfd1420eacd4651924cfc71341940f6c4ecc697"


def dataset(pairs: list[int], shards: int = 1, n_bytes: list[int] | None = None) -> TokenDataset:
    """Every text id is unique, so that a token names its document and place."""
    documents, following = [], 1
    for n in pairs:
        documents.append([EOT, *range(following, following + n - 1), EOT])
        following += n - 1
    whole = TokenDataset.from_documents(documents, following, n_bytes)
    borders = [int(whole.lengths[: len(pairs) * i // shards].sum()) for i in range(1, shards)]
    return TokenDataset(np.split(whole.shards[0], borders), whole.lengths, whole.bytes, following)


def pairs_of(n: int, seed: int = 0, low: int = 2, high: int = 50) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, n).tolist()


def config(context: int = 32, rows: int = 2, steps: int = 1, **changes) -> BatchConfig:
    size = context * rows
    options = {"context": context, "micro_batch_tokens": size, "global_batch_tokens": size * steps, "max_docs": 16}
    return BatchConfig(**(options | changes))


def same(a: StepBatch, b: StepBatch) -> bool:
    counts = (a.n_targets, a.n_tokens, a.sum_len_sq) == (b.n_targets, b.n_tokens, b.sum_len_sq)
    return counts and all(itertools.starmap(same_batch, zip(a.micro_batches, b.micro_batches, strict=True)))


def same_batch(a: VarlenBatch, b: VarlenBatch) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "targets", "positions", "cu_seqlens")
    )


def check_micro_batch(batch: VarlenBatch, config: BatchConfig, data: TokenDataset) -> list[int]:
    """Holds every rule of the contract against the documents themselves; returns the lengths of the text pieces."""
    size, max_docs = config.micro_batch_tokens, config.resolved_max_docs()
    shapes = {name: tuple(getattr(batch, name).shape) for name in ("tokens", "targets", "positions", "cu_seqlens")}
    assert shapes == {"tokens": (size,), "targets": (size,), "positions": (size,), "cu_seqlens": (max_docs + 1,)}
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert (batch.positions.dtype, batch.cu_seqlens.dtype) == (torch.int32, torch.int32)
    assert batch.max_seqlen == config.context
    cu = batch.cu_seqlens.tolist()
    assert cu[0] == 0
    assert cu == sorted(cu)
    assert cu[-1] <= size
    real = cu[-1]
    assert (batch.tokens[real:] == EOT).all()
    assert (batch.targets[real:] == -100).all()
    assert (batch.positions[real:] == 0).all()
    following = {}
    for i in range(len(data)):
        ids = data.document(i).tolist()
        following.update({token: after for token, after in itertools.pairwise(ids) if token != EOT})
    first_texts = {int(data.document(i)[1]) for i in range(len(data))}
    lengths = []
    segments = [(start, end) for start, end in itertools.pairwise(cu) if end > start]
    for start, end in segments:
        tokens, targets = batch.tokens[start:end].tolist(), batch.targets[start:end].tolist()
        assert batch.positions[start:end].tolist() == list(range(end - start))
        assert end - start <= config.context
        if targets[0] == -100:  # a padded row's rest
            assert config.packing is Packing.pad
            assert set(tokens) == {EOT}
            assert set(targets) == {-100}
            continue
        lengths.append(end - start)
        assert tokens[1:] == targets[:-1]
        for i, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            if token == EOT:
                assert i == 0, "end of text is read at a document's beginning only"
                assert target in first_texts
            else:
                assert target == following[token]
    return lengths


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=40),
    st.integers(4, 20),
    st.integers(1, 3),
    st.sampled_from(list(Packing)),
    st.sampled_from(list(LongDocuments)),
    st.integers(1, 3),
    st.integers(5, 12),
)
@settings(max_examples=100, deadline=None)
def test_every_batch_keeps_the_contract(pairs, context, rows, packing, policy, shards, max_docs):
    batch = config(context, rows, packing=packing, long_documents=policy, max_docs=max_docs, open_bins=3)
    data = dataset(pairs, min(shards, len(pairs)))
    if policy is LongDocuments.drop and min(pairs) > context:
        with pytest.raises(ValueError, match="long_documents"):
            TrainStream(data, batch, 0, EOT)
        return
    for step, _ in itertools.islice(TrainStream(data, batch, 5, EOT), 6):
        lengths = [n for micro in step.micro_batches for n in check_micro_batch(micro, batch, data)]
        assert step.n_tokens == step.n_targets == sum(lengths)
        assert step.n_targets == sum(int((micro.targets != -100).sum()) for micro in step.micro_batches)
        assert step.sum_len_sq == sum(n * n for n in lengths)


@pytest.mark.parametrize("packing", list(Packing))
def test_an_epoch_predicts_every_token_once(packing: Packing):
    pairs = pairs_of(300)
    data = dataset(pairs, shards=3)
    stream = TrainStream(data, config(packing=packing, open_bins=4), 1, EOT)
    counts = np.zeros(data.vocab_size, dtype=int)
    while stream.plan.epoch < 4:
        step, _ = next(stream)
        for micro in step.micro_batches:
            targets = micro.targets[micro.targets != -100].numpy()
            np.add.at(counts, targets, 1)
    # Whole epochs differ by what waits in open bins, and by the current epoch's beginning.
    assert counts[1:].min() >= 3
    assert counts[1:].max() <= 5
    assert counts[EOT] >= 3 * len(pairs)


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("policy", list(LongDocuments))
def test_resume_is_bit_identical_anywhere(packing: Packing, policy: LongDocuments):
    data = dataset(pairs_of(120), shards=2)
    batch = config(steps=3, packing=packing, long_documents=policy)
    steps, states, epochs = [], [], []
    stream = TrainStream(data, batch, 9, EOT)
    for step, state in itertools.islice(stream, 70):
        steps.append(step)
        states.append(json.loads(json.dumps(state)))
        epochs.append(stream.plan.epoch)
    ends = [i for i in range(69) if epochs[i] != epochs[i + 1]]
    assert len(ends) >= 2
    for place in {0, 7, 23, 40, *ends[:2]}:
        resumed = TrainStream(data, batch, 9, EOT, state=states[place])
        for expected, expected_state in zip(steps[place + 1 :], states[place + 1 :], strict=True):
            step, state = next(resumed)
            assert same(step, expected)
            assert json.loads(json.dumps(state)) == expected_state


def test_resume_inside_a_large_epoch():
    # More pieces than are converted at once, so that the cursor lies inside a chunk.
    data = dataset(pairs_of(10_000))
    batch = config(context=64, rows=4, max_docs=64)
    stream = TrainStream(data, batch, 2, EOT)
    states = [state for _, state in itertools.islice(stream, 900)]
    for place in (13, 500, 870):
        resumed = TrainStream(data, batch, 2, EOT, state=states[place])
        assert [state for _, state in itertools.islice(resumed, 899 - place)] == states[place + 1 :]


def test_state_is_small_and_does_not_change_afterwards():
    stream = TrainStream(dataset(pairs_of(5000)), config(context=64, rows=8, max_docs=256), 2, EOT)
    _, state = next(stream)
    saved = json.dumps(state)
    for _ in range(50):
        next(stream)
    assert json.dumps(state) == saved
    assert len(saved) < 20_000


@pytest.mark.parametrize("packing", list(Packing))
def test_ranks_share_one_plan(packing: Packing):
    data = dataset(pairs_of(200))
    batch = config(steps=4, packing=packing)
    alone = TrainStream(data, batch, 4, EOT)
    worlds = {n: [TrainStream(data, batch, 4, EOT, rank, n) for rank in range(n)] for n in (2, 4)}
    for _ in range(15):
        wanted, wanted_state = next(alone)
        assert len(wanted.micro_batches) == 4
        for world_size, streams in worlds.items():
            taken = [next(stream) for stream in streams]
            assert all(len(step.micro_batches) == 4 // world_size for step, _ in taken)
            union = [micro for group in zip(*(step.micro_batches for step, _ in taken), strict=True) for micro in group]
            assert all(itertools.starmap(same_batch, zip(union, wanted.micro_batches, strict=True)))
            for step, state in taken:
                assert (step.n_targets, step.n_tokens, step.sum_len_sq) == (
                    wanted.n_targets,
                    wanted.n_tokens,
                    wanted.sum_len_sq,
                )
                assert state == wanted_state


def test_another_number_of_ranks_goes_on_from_the_state():
    data, batch = dataset(pairs_of(200)), config(steps=4)
    alone = TrainStream(data, batch, 4, EOT)
    *_, (_, state) = itertools.islice(alone, 11)
    pair = [TrainStream(data, batch, 4, EOT, rank, 2, state) for rank in range(2)]
    wanted, _ = next(alone)
    first, second = (next(stream)[0].micro_batches for stream in pair)
    union = [first[0], second[0], first[1], second[1]]
    assert all(itertools.starmap(same_batch, zip(union, wanted.micro_batches, strict=True)))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"context": 16, "rows": 4}, "batch.context"),
        ({"steps": 2}, "batch.global_batch_tokens"),
        ({"rows": 1, "steps": 8}, "batch.micro_batch_tokens"),
        ({"packing": Packing.concat}, "batch.packing"),
        ({"max_docs": 15}, "batch.max_docs"),
        ({"open_bins": 7}, "batch.open_bins"),
        ({"long_documents": LongDocuments.drop}, "batch.long_documents"),
    ],
    ids=str,
)
def test_state_of_another_layout_is_refused(changes: dict, key: str):
    data = dataset(pairs_of(50))
    _, state = next(TrainStream(data, config(steps=4), 4, EOT))
    with pytest.raises(ValueError, match=rf"{key} must be as in the checkpoint \("):
        TrainStream(data, config(**({"steps": 4} | changes)), 4, EOT, state=state)


def test_state_of_other_data_is_refused():
    batch = config()
    data = dataset(pairs_of(50))
    _, state = next(TrainStream(data, batch, 4, EOT))
    with pytest.raises(ValueError, match=r"seed must be as in the checkpoint \(4\), got 5"):
        TrainStream(data, batch, 5, EOT, state=state)
    data.fingerprint = "other"
    with pytest.raises(ValueError, match="data must be as in the checkpoint"):
        TrainStream(data, batch, 4, EOT, state=state)


def test_global_batch_must_fit_the_ranks():
    with pytest.raises(ValueError, match=r"batch\.global_batch_tokens must be a multiple of .* 64 × 3"):
        TrainStream(dataset([5]), config(steps=4), 0, EOT, 0, 3)


def test_batches_are_pinned():
    # Neither the hash seed of this process nor the platform may matter; another value breaks every saved state.
    data = TokenDataset.from_documents([[0, *range(1, 2 + i % 47), 0] for i in range(100)], 50)
    stream, digest = TrainStream(data, BatchConfig(32, 64, 64), 3, EOT), hashlib.sha256()
    for step, _ in itertools.islice(stream, 40):
        digest.update(step.micro_batches[0].tokens.numpy().astype("<i8").tobytes())
    assert digest.hexdigest() == PINNED


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("packing", list(Packing))
def test_validation_shows_everything_once(world_size: int, packing: Packing):
    pairs = pairs_of(80, high=90)
    data = dataset(pairs, shards=2, n_bytes=[3 * n + 1 for n in pairs])
    # Whatever training does to long documents, validation counts them whole.
    batch = config(packing=packing, long_documents=LongDocuments.truncate)
    ranks = [list(validation_steps(data, batch, EOT, rank, world_size)) for rank in range(world_size)]
    assert len({len(steps) for steps in ranks}) == 1
    counts = np.zeros(data.vocab_size, dtype=int)
    tokens, n_bytes = 0, 0
    for steps in zip(*ranks, strict=True):
        lengths: list[int] = []
        for step in steps:
            (micro,) = step.micro_batches
            lengths += check_micro_batch(micro, config(), data)
            np.add.at(counts, micro.targets[micro.targets != -100].numpy(), 1)
        for step in steps:
            assert step.n_tokens == step.n_targets == sum(lengths)
            assert step.sum_len_sq == sum(n * n for n in lengths)
            assert step.n_bytes == steps[0].n_bytes
        tokens, n_bytes = tokens + steps[0].n_tokens, n_bytes + steps[0].n_bytes
    assert tokens == sum(pairs)
    assert n_bytes == sum(3 * n + 1 for n in pairs)
    assert (counts[1:] == 1).all()
    assert counts[EOT] == len(pairs)


def test_validation_of_a_rank_without_work_is_padding():
    data = dataset([10])
    (step,) = validation_steps(data, config(), EOT, rank=1, world_size=2)
    (micro,) = step.micro_batches
    assert step.n_targets == 10
    assert (micro.tokens == EOT).all()
    assert (micro.targets == -100).all()
    assert (micro.cu_seqlens == 0).all()


def test_validation_order_is_fixed():
    data, batch = dataset(pairs_of(60)), config()
    first, second = (list(validation_steps(data, batch, EOT)) for _ in range(2))
    assert all(itertools.starmap(same, zip(first, second, strict=True)))


def test_documents_of_the_largest_sizes_are_exact():
    # uint32 ids, and a Σ len² beyond 32 bits.
    n = 70_000
    data = TokenDataset(
        [np.array([EOT, *range(n, 2 * n - 1), EOT], dtype=np.uint32)], np.array([n + 1]), np.zeros(1), n
    )
    batch = BatchConfig(context=n, micro_batch_tokens=n, global_batch_tokens=n)
    step, _ = next(TrainStream(data, batch, 0, EOT))
    assert step.sum_len_sq == n * n
    assert int(step.micro_batches[0].tokens[-1]) == 2 * n - 2
