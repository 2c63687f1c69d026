"""Between padded batches and packed tokens: flash_attn's pad_input, unpad_input and index_first_axis, and cu_seqlens
from what a data pipeline knows (document ids, or end-of-sequence tokens). Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa2 import checks


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor, differentiable; a row that is taken twice gets both gradients.

    Args:
        input: (rows, ...).
        indices: (total,) int64 or int32, which rows.

    Returns:
        (total, ...).

    Raises:
        ValueError: indices is not of shape (total,).
    """
    if indices.dim() != 1:
        raise checks.refused("indices", "of shape (total,)", tuple(indices.shape))
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take the valid tokens of a padded batch, side by side.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int, non-zero where a token is valid.
        unused_mask: (batch, seqlen), bool or int, non-zero for tokens that get a place and are not attended to.

    Returns:
        hidden_states (total, ...), where total counts the tokens of both masks;
        indices (total,) int64, their places in the flattened batch;
        cu_seqlens (batch + 1,) int32; max_seqlen_in_batch, an int; both over both masks;
        seqused (batch,) int32, the tokens of attention_mask alone.
        Reads the counts on the host: on a GPU it synchronises.

    Raises:
        ValueError: a mask is not of shape (batch, seqlen).
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            rule = f"of shape (batch, seqlen) = {tuple(hidden_states.shape[:2])}"
            raise checks.refused(name, rule, tuple(mask.shape))
    valid = attention_mask.bool()
    placed = valid if unused_mask is None else valid | unused_mask.bool()
    lengths = placed.sum(dim=-1, dtype=torch.int32)
    indices = placed.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, longest, valid.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back into a padded batch; the inverse of `unpad_input`, differentiable.

    Args:
        hidden_states: (total, ...).
        indices: (total,) int64, places in the flattened batch, as `unpad_input` returns them.
        batch, seqlen: the shape of the padded batch, in sequences and tokens.

    Returns:
        (batch, seqlen, ...), zeros where no token was.

    Raises:
        ValueError: indices is not of shape (total,).
    """
    if indices.shape != hidden_states.shape[:1]:
        rule = f"of shape (total,) = ({hidden_states.shape[0]},)"
        raise checks.refused("indices", rule, tuple(indices.shape))
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _require_ids(name: str, ids: Tensor) -> None:
    if ids.dim() != 1:
        raise checks.refused(name, "of shape (T,)", tuple(ids.shape))
    if ids.is_floating_point():
        raise checks.refused(name, "integers", ids.dtype)


def _from_starts(starts: Tensor, total: Tensor, max_docs: int | None) -> Tensor:
    """cu_seqlens from (T,) bool, true at the first token of each document, and the 0-d number of tokens that count."""
    T, device = starts.shape[0], starts.device
    if max_docs is None:
        at = starts.nonzero().flatten()
        return torch.cat((at, total[None])).to(torch.int32)
    n_docs = starts.sum()
    if device.type == "cpu" or checks.values_wanted():
        n = int(n_docs)
        if n > max_docs:
            raise checks.refused("max_docs", f"at least the number of documents ({n})", max_docs)
    # The last slot catches the tokens that start no document; it is overwritten by the total.
    cu_seqlens = total.to(torch.int32).repeat(max_docs + 1)
    slot = torch.where(starts, starts.cumsum(0) - 1, max_docs).clamp(max=max_docs)
    cu_seqlens.scatter_(0, slot, torch.arange(T, dtype=torch.int32, device=device))
    cu_seqlens[max_docs] = total
    return cu_seqlens


def cu_seqlens_from_document_ids(document_ids: Tensor, max_docs: int | None = None) -> Tensor:
    """Cumulative lengths of packed documents from one id a token.

    Args:
        document_ids: (T,) integers; a document is a run of equal ids. Negative ids mark padding, which comes last and
            belongs to no document.
        max_docs: fixes the length of the result, so that shapes stay static and nothing is read back from a GPU.

    Returns:
        cu_seqlens (documents + 1,) int32 on the ids' device, [0, ..., tokens that are no padding]; with max_docs
        (max_docs + 1,), its last value repeated. Without max_docs it synchronises on a GPU.

    Raises:
        ValueError: document_ids is not one-dimensional or not of integers; more than max_docs documents (on a GPU this
            is checked only with FA2_CHECK=1).
    """
    ids = document_ids
    _require_ids("document_ids", ids)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    valid = ids >= 0
    return _from_starts(starts & valid, valid.sum(), max_docs)


def cu_seqlens_from_eos(tokens: Tensor, eos_id: int, max_docs: int | None = None) -> Tensor:
    """Cumulative lengths of packed documents from their tokens; an end-of-sequence token is the last of its document.

    Args:
        tokens: (T,) integers. Tokens after the last end-of-sequence token form a document of their own.
        eos_id: the end-of-sequence token.
        max_docs: as `cu_seqlens_from_document_ids`.

    Returns:
        cu_seqlens (documents + 1,) int32 on the tokens' device, [0, ..., T]; with max_docs (max_docs + 1,), its last
        value repeated. Without max_docs it synchronises on a GPU.

    Raises:
        ValueError: tokens is not one-dimensional or not of integers; more than max_docs documents (on a GPU this
            is checked only with FA2_CHECK=1).
    """
    _require_ids("tokens", tokens)
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[1:] = tokens[:-1] == eos_id
    total = torch.full((), tokens.shape[0], dtype=torch.int64, device=tokens.device)
    return _from_starts(starts, total, max_docs)
