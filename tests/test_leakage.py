"""No document ever sees another, from shard to logits, whatever the packing: perturb A, and B stays bit-identical."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from data.batch import VarlenBatch
from data.config import BatchConfig, Packing
from data.shards import TokenDataset
from data.stream import TrainStream
from model.attention import resolve_attention
from model.config import GPTConfig, Position
from model.gpt import GPT

VOCAB = 64
EOT = 0
LENGTHS = (30, 17, 58, 9, 41, 23, 150, 12)  # ids of each document, both end-of-text ids included; one is cut
PERTURBED = 2
UNUSED = VOCAB - 1  # an id that marks the perturbed document in the batch


def dataset(perturb: bool) -> TokenDataset:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, UNUSED, n).astype(np.uint16) for n in LENGTHS]
    documents[PERTURBED][1:-1] = UNUSED if perturb else documents[PERTURBED][1]
    for document in documents:
        document[0] = document[-1] = EOT
    return TokenDataset([np.concatenate(documents)], np.array(LENGTHS), np.zeros(len(LENGTHS), np.int64), VOCAB)


def batches(packing: Packing, perturb: bool, n: int) -> list[VarlenBatch]:
    config = BatchConfig(context=64, micro_batch_tokens=192, global_batch_tokens=192, packing=packing, open_bins=4)
    stream = TrainStream(dataset(perturb), config, seed=1, eot_id=EOT)
    return [next(stream)[0].micro_batches[0] for _ in range(n)]


@pytest.mark.parametrize("position", list(Position))
@pytest.mark.parametrize("packing", list(Packing))
def test_perturbing_a_document_changes_no_other(packing: Packing, position: Position) -> None:
    torch.manual_seed(0)
    _, attention = resolve_attention("reference", torch.device("cpu"), torch.float32, 8)
    config = GPTConfig(vocab_size=VOCAB, max_positions=64, n_layer=2, d_model=32, nheads_q=4, position=position)
    model = GPT(config, attention)
    changed_rows = same_rows = 0
    for before, after in zip(batches(packing, False, 6), batches(packing, True, 6), strict=True):
        assert torch.equal(before.cu_seqlens, after.cu_seqlens)
        assert torch.equal(before.positions, after.positions)
        logits = [
            model.logits(model(b.tokens, b.positions, b.cu_seqlens, b.max_seqlen)).detach() for b in (before, after)
        ]
        ends = after.cu_seqlens.tolist()
        for start, stop in itertools.pairwise(ends):
            equal = torch.equal(logits[0][start:stop], logits[1][start:stop])
            if (before.tokens[start:stop] != after.tokens[start:stop]).any():
                assert not equal
                changed_rows += stop - start
            else:
                assert equal
                same_rows += stop - start
    assert changed_rows
    assert same_rows > changed_rows
