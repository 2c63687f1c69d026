"""`attn_implementation="fa2"` for Hugging Face transformers: the attention function and the mask function.

Knows transformers' two interfaces and fa2's public functions; transformers itself is imported by `register` alone. A
model calls `mask` once per kind of mask and forward, and passes what it returns to `attention` in every layer.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa2 import checks
from fa2.interface import flash_attn_func, flash_attn_varlen_func
from fa2.padding import pad_input, unpad_input

NAME = "fa2"
_OWN_MASKS = "transformers' causal, bidirectional, sliding-window or packed mask"


def register() -> None:
    """`fa2.integrations.register_with_transformers`."""
    rule = "installed in a version whose masks take q_length (5.4 or later)"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(f"fa2: transformers must be {rule}, got: {error}") from error
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"fa2: transformers must be {rule}, got {__version__}")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


# --- the mask. What it returns is one of
#   None                      nothing beyond causal, window and the ends of the batch
#   (batch, n) bool           the keys that are no padding; the queries are its last columns, keys past n are no tokens
#   (documents + 1,) int32    cu_seqlens of a packed batch, all rows side by side
#   () bool                   under torch.compile, where nothing can be looked at: true if it is none of the masks above


def mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor | None:
    """transformers' AttentionMaskInterface: which mask this is, in a form that `attention` can compute with.

    Args:
        batch_size, q_length, kv_length: of the attention to come; kv_length counts the places of a cache.
        q_offset, kv_offset: positions of the first query and of the first key.
        mask_function: (batch, head, query, key) indices -> bool; looked at beside the diagonal, where packed documents
            begin and masks that are neither causal nor bidirectional show.
        attention_mask: (batch, tokens) bool, false on padding; or None.
        use_vmap: a mask of the model's own, or of the user's.

    Returns:
        What the comment above lists. Reads values on the host, once a forward pass, as transformers does itself.

    Raises:
        ValueError: the mask is not one that fa2 computes.
    """
    if use_vmap:
        raise checks.refused("mask_function", _OWN_MASKS, "a custom mask function")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and kv_offset + kv_length > chunk:
        rule = f"at most attention_chunk_size ({chunk}; attention in chunks is not supported)"
        raise checks.refused("kv_length", rule, kv_offset + kv_length)
    if attention_mask is not None:
        device = attention_mask.device
    square = q_length == kv_length and attention_mask is None
    if torch.compiler.is_compiling() and square and isinstance(q_offset, int) and q_offset == kv_offset:
        seen_before, seen_after = _beside_diagonal(mask_function, batch_size, q_length, q_offset, device)
        return ~seen_before.all() | (seen_after.any() & ~seen_after.all())
    first = int(q_offset)
    last = first + q_length - 1
    if q_length > 1:
        seen_before, seen_after = _beside_diagonal(mask_function, batch_size, q_length, first, device)
        whole, some, every = torch.stack((seen_before.all(), seen_after.any(), seen_after.all())).tolist()
        if some and not every:
            raise checks.refused("mask_function", _OWN_MASKS, "one that is causal for a part of the tokens")
        if square and not whole:
            starts = F.pad(~seen_before, (1, 0), value=True).flatten()
            return torch.cat((starts.nonzero().flatten(), starts.new_tensor([len(starts)], dtype=torch.int64))).int()
    tokens = kv_length
    if kv_offset + kv_length - 1 > last and not _sees(mask_function, last, kv_offset + kv_length - 1, device):
        tokens = last + 1 - kv_offset  # a static cache: the places after the last query are empty
    if attention_mask is None:
        return None if tokens == kv_length else torch.ones(batch_size, tokens, dtype=torch.bool, device=device)
    valid = attention_mask[:, kv_offset : kv_offset + tokens].bool()
    valid = F.pad(valid, (0, tokens - valid.shape[1]))
    return None if tokens == kv_length and bool(valid.all()) else valid


def _beside_diagonal(mask_function: Any, batch: int, tokens: int, first: int, device: Any) -> tuple[Tensor, Tensor]:
    """(batch, tokens - 1) bool, twice: whether each token sees the one before it, and the one after it."""
    rows = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    left = torch.arange(first, first + tokens - 1, device=device)[None]
    shape = (batch, tokens - 1)
    return (
        mask_function(rows, head, left + 1, left).expand(shape),
        mask_function(rows, head, left, left + 1).expand(shape),
    )


def _sees(mask_function: Any, query: int, key: int, device: Any) -> bool:
    """Whether the query of the first row sees the key; both are positions."""
    zero, q, k = (torch.full((), x, device=device) for x in (0, query, key))
    return bool(mask_function(zero, zero, q, k))


# --- the attention


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    block_table: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface.

    Args:
        module: the layer; its is_causal counts where the argument is None.
        query: (batch, nheads_q, seqlen_q, headdim), float16 or bfloat16 on a GPU, any floating dtype on a CPU.
        key: (batch, nheads_kv, seqlen_k, headdim); nheads_kv divides nheads_q. With fewer queries than keys a causal
            mask is aligned to the bottom right: the queries are the last tokens.
        value: (batch, nheads_kv, seqlen_k, headdim_v), headdim_v at most headdim (padded with zeros where less).
        attention_mask: what `mask` returned.
        scaling: factor of the scores; None: 1 / sqrt(headdim).
        sliding_window: keys that a query sees, itself among them; without causal as many on either side.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: all four for a packed batch: (documents + 1,)
            integers, and the longest document, in tokens. They count over all rows, and go before the mask's documents.
        dropout, softcap, s_aux, position_bias, block_table, output_attentions: must be off.

    Returns:
        out (batch, seqlen_q, nheads_q, headdim_v) and None for the weights. Causal rows of padding are 0.

    Raises:
        ValueError: an argument breaks a rule; the message names both.
        RuntimeError: no CUDA kernel serves these inputs; under torch.compile on a CPU, documents without cu_seq_lens.
    """
    _options(dropout, softcap, s_aux, position_bias, block_table, output_attentions)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    reach = -1 if sliding_window is None or sliding_window >= key.shape[2] else sliding_window - 1
    headdim_v = value.shape[-1]
    if headdim_v < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - headdim_v))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rest: dict[str, Any] = {"softmax_scale": scaling, "causal": causal, "window_size": (reach, reach)}
    lengths = _lengths(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if lengths is not None:
        if attention_mask is not None and attention_mask.dim() == 2:
            raise checks.refused("attention_mask", "without padding where cu_seq_lens_q is given", "one with padding")
        out = _packed(q, k, v, lengths, rest)
    elif attention_mask is None:
        out = flash_attn_func(q, k, v, **rest)
    elif attention_mask.dim() == 0:
        torch._assert_async(~attention_mask, "fa2: packed documents under torch.compile need cu_seq_lens_q and its kin")
        out = flash_attn_func(q, k, v, **rest)
    elif attention_mask.dim() == 1:
        # No need to know the longest document: one longer than all of them costs nothing.
        out = _packed(q, k, v, (attention_mask, attention_mask, q.shape[1], k.shape[1]), rest)
    elif attention_mask.dim() == 2:
        out = _padded(q, k, v, attention_mask.bool(), rest)
    else:
        raise checks.refused("attention_mask", "None or (batch, tokens)", f"shape {tuple(attention_mask.shape)}")
    return (out[..., :headdim_v] if headdim_v < out.shape[-1] else out), None


def _options(
    dropout: float, softcap: Any, s_aux: Any, position_bias: Any, block_table: Any, output_attentions: Any
) -> None:
    """What models ask for and fa2 does not have: refused, never ignored."""
    if dropout != 0.0:
        raise checks.refused("dropout", "0.0 (set the model's attention dropout to 0; it is off in eval())", dropout)
    if softcap:
        raise checks.refused("softcap", "None (soft-capped scores are not supported)", softcap)
    if output_attentions:
        raise checks.refused("output_attentions", "False (the weights are never formed)", output_attentions)
    for name, value, what in (
        ("s_aux", s_aux, "attention sinks are"),
        ("position_bias", position_bias, "a bias on the scores is"),
        ("block_table", block_table, "a paged KV cache is"),
    ):
        if value is not None:
            raise checks.refused(name, f"None ({what} not supported)", type(value).__name__)


def _lengths(cu_seq_lens_q: Any, cu_seq_lens_k: Any, max_length_q: Any, max_length_k: Any) -> Any:
    """All four, or None where none is given."""
    given = {
        "cu_seq_lens_q": cu_seq_lens_q,
        "cu_seq_lens_k": cu_seq_lens_k,
        "max_length_q": max_length_q,
        "max_length_k": max_length_k,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 4:
        return None
    if missing:
        others = ", ".join(name for name in given if name not in missing)
        raise checks.refused(missing[0], f"given together with {others}", None)
    return tuple(given.values())


def _packed(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, Tensor, Any, Any], rest: dict[str, Any]) -> Tensor:
    """Documents side by side, over all rows of the batch. lengths: cu_seqlens and longest, of queries and of keys."""
    cu_q, cu_k, max_q, max_k = lengths
    same = cu_k is cu_q
    cu_q = cu_q.int()
    cu_k = cu_q if same else cu_k.int()
    out = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, max_q, max_k, **rest)
    return out.unflatten(0, q.shape[:2])


def _padded(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, rest: dict[str, Any]) -> Tensor:
    """valid (batch, n) bool, of the keys; the queries of a causal mask or a window are its last columns."""
    batch, seqlen_q = q.shape[:2]
    tokens = valid.shape[1]
    if rest["window_size"] != (-1, -1):
        _without_holes(valid)
    k, indices, cu_k, max_k, _ = unpad_input(k[:, :tokens], valid)
    v = v[:, :tokens].flatten(0, 1)[indices]
    if not rest["causal"] and rest["window_size"] == (-1, -1):
        # The keys may be another sequence's (cross-attention), and every query sees them all: none is left out.
        cu_q = torch.arange(0, batch * seqlen_q + 1, seqlen_q, dtype=torch.int32, device=q.device)
        out = flash_attn_varlen_func(q.flatten(0, 1), k, v, cu_q, cu_k, seqlen_q, max_k, **rest)
        return out.unflatten(0, (batch, seqlen_q))
    if seqlen_q == tokens:
        q, cu_q, max_q = q.flatten(0, 1)[indices], cu_k, max_k
    else:
        q, indices, cu_q, max_q, _ = unpad_input(q, valid[:, tokens - seqlen_q :])
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **rest)
    return pad_input(out, indices, batch, seqlen_q)


def _without_holes(valid: Tensor) -> None:
    """A window counts places, and places between two tokens of a row would be lost."""
    stretches = valid[:, 0] + (valid[:, 1:] & ~valid[:, :-1]).sum(dim=1)
    if bool((stretches > 1).any()):
        rule = "padded at the ends of its rows alone, where there is a sliding window"
        raise checks.refused("attention_mask", rule, "padding between tokens")
