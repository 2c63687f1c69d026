"""Padded batches to packed tokens and back, and cu_seqlens from ids and end tokens."""

from __future__ import annotations

import pytest
import torch

import fa2


def test_unpad_then_pad_is_the_masked_input():
    x = torch.randn(3, 6, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    packed, indices, cu, longest, used = fa2.unpad_input(x, mask)
    assert packed.shape == (8, 2, 4)
    assert cu.tolist() == [0, 3, 3, 8]
    assert (cu.dtype, used.dtype) == (torch.int32, torch.int32)
    assert longest == 5
    assert isinstance(longest, int)
    assert used.tolist() == [3, 0, 5]
    back = fa2.pad_input(packed, indices, 3, 6)
    assert torch.equal(back, x * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[..., None, None].expand_as(x).float())


def test_unused_tokens_get_a_place_and_are_not_counted_as_used():
    x = torch.arange(8.0).view(2, 4, 1)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    packed, indices, cu, longest, used = fa2.unpad_input(x, mask.bool(), unused.bool())
    assert packed.flatten().tolist() == [0, 1, 2, 4]
    assert indices.tolist() == [0, 1, 2, 4]
    assert cu.tolist() == [0, 3, 4]
    assert longest == 3
    assert used.tolist() == [2, 1]


def test_attention_of_a_padded_batch():
    x = torch.randn(2, 9, 3, 2, 8, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    packed, indices, cu, longest, _ = fa2.unpad_input(x, mask)
    out = fa2.pad_input(fa2.flash_attn_varlen_qkvpacked_func(packed, cu, longest, causal=True), indices, 2, 9)
    for i, n in enumerate((5, 9)):
        alone = fa2.flash_attn_qkvpacked_func(x[i : i + 1, :n], causal=True)[0]
        assert torch.equal(out[i, :n], alone)
    assert (out[0, 5:] == 0).all()


def test_masks_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"fa2: attention_mask must be of shape \(batch, seqlen\) = \(2, 3\), got"):
        fa2.unpad_input(torch.zeros(2, 3, 1), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"fa2: indices must be of shape \(total,\) = \(3,\), got"):
        fa2.pad_input(torch.zeros(3, 1), torch.arange(4), 2, 2)


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([0, 0, 0, 5, 5, 2, -1, -1], [0, 3, 5, 6]),
        ([1, 1, 0, 0, 1], [0, 2, 4, 5]),  # ids need not be sorted: a document is a run
        ([7], [0, 1]),
        ([-1, -1], [0]),
        ([], [0]),
    ],
    ids=str,
)
def test_from_document_ids(ids, wanted):
    ids = torch.tensor(ids, dtype=torch.int64)
    cu = fa2.cu_seqlens_from_document_ids(ids)
    assert cu.tolist() == wanted
    assert cu.dtype == torch.int32
    fixed = fa2.cu_seqlens_from_document_ids(ids, max_docs=5)
    assert fixed.tolist() == wanted + wanted[-1:] * (6 - len(wanted))
    assert fixed.dtype == torch.int32
    assert fa2.cu_seqlens_from_document_ids(ids, max_docs=len(wanted) - 1).tolist() == wanted


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [([4, 4, 0, 3, 0, 1], [0, 3, 5, 6]), ([4, 4, 0, 3, 0], [0, 3, 5]), ([0, 0], [0, 1, 2]), ([3], [0, 1]), ([], [0])],
    ids=str,
)
def test_from_eos(tokens, wanted):
    tokens = torch.tensor(tokens, dtype=torch.int64)
    assert fa2.cu_seqlens_from_eos(tokens, eos_id=0).tolist() == wanted
    assert fa2.cu_seqlens_from_eos(tokens, 0, max_docs=4).tolist() == wanted + wanted[-1:] * (5 - len(wanted))


def test_bad_ids_are_named():
    with pytest.raises(ValueError, match=r"fa2: document_ids must be of shape \(T,\), got \(1, 2\)"):
        fa2.cu_seqlens_from_document_ids(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"fa2: document_ids must be integers, got torch.float32"):
        fa2.cu_seqlens_from_document_ids(torch.zeros(2))
    with pytest.raises(ValueError, match=r"fa2: tokens must be integers, got torch.float32"):
        fa2.cu_seqlens_from_eos(torch.zeros(2), 0)
    with pytest.raises(ValueError, match=r"fa2: max_docs must be at least the number of documents \(3\), got 2"):
        fa2.cu_seqlens_from_document_ids(torch.tensor([1, 2, 3]), max_docs=2)


def test_fixed_length_reads_no_value_off_the_cpu():
    ids = torch.zeros(10, dtype=torch.int64, device="meta")
    assert fa2.cu_seqlens_from_document_ids(ids, max_docs=4).shape == (5,)
    assert fa2.cu_seqlens_from_eos(ids, 0, max_docs=4).shape == (5,)
