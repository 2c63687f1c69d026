"""The six public functions, with flash_attn 2's names, argument order and semantics: check, cast, pad, call the
operator. Knows no kernel. Read next: `ops.py` (the operators), `reference.py` (what they compute).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa2 import checks, extension, ops


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast as a matmul would: everything but float64 to the region's dtype."""
    device_type = "cuda" if tensors[0].is_cuda else tensors[0].device.type  # device.type makes a string anew
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


_served: set[tuple[torch.device, torch.dtype]] = set()  # GPUs whose kernels are loaded: not asked about again


def _need_kernel(q: Tensor, headdim: int) -> None:
    """On CUDA: a dtype that kernels have, and a kernel for it on this GPU. On a CPU everything works."""
    eager = not torch.compiler.is_compiling()
    if eager and (q.device, q.dtype) in _served and headdim <= checks.MAX_HEADDIM:
        return
    if q.device.type in checks.HOST_DEVICES:
        return
    if q.dtype not in (torch.float16, torch.bfloat16):
        rule = "float16 or bfloat16 on a GPU (float32 inputs are cast under torch.autocast)"
        raise checks.refused("q", rule, q.dtype)
    if headdim > checks.MAX_HEADDIM:
        raise checks.refused("headdim", f"at most {checks.MAX_HEADDIM}", headdim)
    # A constant, because the look-up happens while Dynamo traces, and under dynamic shapes headdim is a symbol.
    size = next(size for size in range(8, checks.MAX_HEADDIM + 1, 8) if headdim <= size)
    problem = extension.kernel_problem(str(q.device), q.dtype, size)
    if problem is not None:
        raise RuntimeError(f"fa2: {problem}")
    if eager:
        _served.add((q.device, q.dtype))


def _kernel_ready(headdim: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """headdim padded with zeros to a multiple of 8, and one copy where the last dimension is not contiguous."""
    if headdim % 8:
        return tuple([F.pad(x, (0, -headdim % 8)) for x in tensors])
    return tuple([x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous() for x in tensors])


def _apart(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views where one tensor comes twice: Dynamo refuses a Function that is given the same tensor in two places."""
    k = k.view_as(k) if k is q else k
    return q, k, v.view_as(v) if v is q or v is k else v


def _attend(function: Any, tensors: tuple[Tensor, ...], rest: tuple[Any, ...], with_lse: bool) -> Any:
    """Make the checked tensors ready for a kernel, apply the autograd function, cut the padding off."""
    headdim = tensors[0].shape[-1]
    _need_kernel(tensors[0], headdim)
    result = ops.apply(function, _kernel_ready(headdim, tensors), *rest, with_lse)
    if not (with_lse or headdim % 8):
        return result
    out, lse = result if with_lse else (result, None)
    out = out[..., :headdim] if headdim % 8 else out
    return (out, lse, None) if with_lse else out


def _number(max_seqlen: Any) -> int:
    return int(max_seqlen) if isinstance(max_seqlen, Tensor) else max_seqlen


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over a batch of equally long sequences: softmax(softmax_scale * q kᵀ + mask) v.

    Args:
        q: (batch, seqlen_q, nheads_q, headdim), float16 or bfloat16 on a GPU, any floating dtype on a CPU. Any strides;
            a last dimension that is not contiguous costs a copy. headdim at most 256 on a GPU.
        k, v: (batch, seqlen_k, nheads_kv, headdim), dtype and device of q; nheads_kv divides nheads_q.
        dropout_p: must be 0.0.
        softmax_scale: factor of the scores; None: 1 / sqrt(headdim).
        causal: row i sees key j if j <= i + seqlen_k - seqlen_q (aligned to the bottom right).
        window_size: (left, right), inclusive: row i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right. -1 is unbounded, and so is a bound of seqlen_k or more. With causal, right
            is 0.
        softcap: must be 0.0.
        alibi_slopes: must be None.
        deterministic: a backward whose dq is the same bit for bit in every run (the CPU's always is).
        return_attn_probs: also return softmax_lse.

    Returns:
        out (batch, seqlen_q, nheads_q, headdim), q's dtype; a row that sees no key is 0 and has zero gradients.
        With return_attn_probs (out, softmax_lse, None): softmax_lse (batch, nheads_q, seqlen_q), the natural log of the
        sum of exponentials, float32 (float64 for float64), -inf for a row that sees no key; it carries no gradient.

    Raises:
        ValueError: an argument breaks one of the rules above; the message names the argument and the rule.
        RuntimeError: no CUDA kernel serves these inputs, or a second derivative is asked for.

    Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    checks.options(dropout_p, softcap, alibi_slopes)
    checks.tensors(q, k, v)
    q, k, v = _autocast(q, k, v)
    checks.dense(q, k, v)
    mask = (checks.scale(softmax_scale, q.shape[-1]), *checks.window(window_size, causal, k.shape[1]))
    return _attend(ops.Dense, _apart(q, k, v), (mask, deterministic), return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention over sequences of different lengths laid side by side, without padding.

    Sequence i holds the queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys of the same range of cu_seqlens_k;
    either may be empty. Tokens at or past cu_seqlens[-1] belong to no sequence: out 0, lse -inf, gradients 0, whatever
    they hold. Sequences never influence each other.

    Args:
        q: (total_q, nheads_q, headdim), float16 or bfloat16 on a GPU, any floating dtype on a CPU. Any strides; a last
            dimension that is not contiguous costs a copy. headdim at most 256 on a GPU.
        k, v: (total_k, nheads_kv, headdim), dtype and device of q; nheads_kv divides nheads_q.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, contiguous, on q's device; start at 0, do not decrease.
            Padding them by repeating the last value adds empty sequences, which cost nothing.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens; larger is legal and costs nothing. Smaller
            ones are undefined on a GPU, and an error with FA2_CHECK=1.
        dropout_p, softmax_scale, causal, softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.
        window_size: as `flash_attn_func`, each sequence aligned to its own bottom right; a bound of max_seqlen_k or
            more is unbounded.
        block_table: must be None.

    Returns:
        out (total_q, nheads_q, headdim), q's dtype.
        With return_attn_probs (out, softmax_lse, None): softmax_lse (nheads_q, total_q), natural log, float32 (float64
        for float64), -inf for a row that sees no key; it carries no gradient.

    Raises:
        ValueError: an argument breaks one of the rules above; values of cu_seqlens are checked on a CPU, and on a GPU
            with FA2_CHECK=1 in the environment (which synchronises).
        RuntimeError: no CUDA kernel serves these inputs, or a second derivative is asked for.

    Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    checks.options(dropout_p, softcap, alibi_slopes, block_table)
    max_seqlen_q, max_seqlen_k = _number(max_seqlen_q), _number(max_seqlen_k)
    checks.tensors(q, k, v)
    q, k, v = _autocast(q, k, v)
    checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if checks.values_wanted():
        checks.varlen_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], "max_seqlen_q", max_seqlen_q)
        checks.varlen_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], "max_seqlen_k", max_seqlen_k)
    mask = (checks.scale(softmax_scale, q.shape[-1]), *checks.window(window_size, causal, max_seqlen_k))
    cu_seqlens = (cu_seqlens_q, None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k)
    rest = (*cu_seqlens, (max_seqlen_q, max_seqlen_k, *mask), deterministic)
    return _attend(ops.Varlen, _apart(q, k, v), rest, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` on one tensor that holds q, k and v; they are views, nothing is copied.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim).
        The others: as `flash_attn_func`.

    Returns:
        As `flash_attn_func`; the gradient of qkv is one tensor, which the kernel writes in place.

    Raises:
        As `flash_attn_func`.

    Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    checks.options(dropout_p, softcap, alibi_slopes)
    checks.packed("qkv", qkv, 3, 5, "(batch, seqlen, 3, nheads, headdim)")
    (qkv,) = _autocast(qkv)
    mask = (checks.scale(softmax_scale, qkv.shape[-1]), *checks.window(window_size, causal, qkv.shape[1]))
    return _attend(ops.DenseQkvpacked, (qkv,), (mask, deterministic), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` on one tensor that holds k and v; they are views, nothing is copied.

    Args:
        q: (batch, seqlen_q, nheads_q, headdim).
        kv: (batch, seqlen_k, 2, nheads_kv, headdim).
        The others: as `flash_attn_func`.

    Returns:
        As `flash_attn_func`; the gradient of kv is one tensor.

    Raises:
        As `flash_attn_func`.

    Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    checks.packed("kv", kv, 2, 5, "(batch, seqlen, 2, nheads_kv, headdim)")
    k, v = kv.unbind(dim=-3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` on one tensor that holds q, k and v; they are views, nothing is copied.

    Args:
        qkv: (total, 3, nheads, headdim).
        cu_seqlens: (batch + 1,) int32, for queries and keys alike.
        max_seqlen: at least the longest sequence, in tokens.
        The others: as `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`; the gradient of qkv is one tensor.

    Raises:
        As `flash_attn_varlen_func`.

    Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    checks.options(dropout_p, softcap, alibi_slopes)
    max_seqlen = _number(max_seqlen)
    checks.varlen_packed(qkv, cu_seqlens, max_seqlen)
    (qkv,) = _autocast(qkv)
    if checks.values_wanted():
        checks.varlen_values("cu_seqlens", cu_seqlens, qkv.shape[0], "max_seqlen", max_seqlen)
    mask = (checks.scale(softmax_scale, qkv.shape[-1]), *checks.window(window_size, causal, max_seqlen))
    return _attend(ops.VarlenQkvpacked, (qkv,), (cu_seqlens, max_seqlen, mask, deterministic), return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` on one tensor that holds k and v; they are views, nothing is copied.

    Args:
        q: (total_q, nheads_q, headdim).
        kv: (total_k, 2, nheads_kv, headdim).
        The others: as `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`; the gradient of kv is one tensor.

    Raises:
        As `flash_attn_varlen_func`.

    Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    checks.packed("kv", kv, 2, 4, "(total, 2, nheads_kv, headdim)")
    k, v = kv.unbind(dim=-3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
