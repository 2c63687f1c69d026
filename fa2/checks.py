"""What the public functions refuse, each with one sentence: "fa2: <argument> must be <rule>, got <value>".

Shapes, dtypes and devices are always checked. Values of cu_seqlens are on the device, so they are checked where reading
them is free (CPU tensors), and on a GPU only with FA2_CHECK=1, which synchronises.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from typing import Any

import torch
from torch import Tensor

MAX_HEADDIM = 256
HOST_DEVICES = ("cpu", "meta")  # no CUDA kernel is needed, so every dtype and headdim will do
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refused(argument: str, rule: str, value: object) -> ValueError:
    """The error to raise.

    Built only when something is wrong: the text costs time, and to format a symbolic size fixes it under torch.compile.
    """
    return ValueError(f"fa2: {argument} must be {rule}, got {value}")


def options(
    *, dropout_p: float = 0.0, softcap: float = 0.0, alibi_slopes: Tensor | None = None, block_table: Any = None
) -> None:
    """Options of flash_attn that no kernel here has: refused, never ignored."""
    if dropout_p != 0.0:
        raise refused("dropout_p", "0.0 (attention dropout is not supported)", dropout_p)
    if softcap != 0.0:
        raise refused("softcap", "0.0 (soft-capped scores are not supported)", softcap)
    if alibi_slopes is not None:
        raise refused("alibi_slopes", "None (ALiBi is not supported)", type(alibi_slopes).__name__)
    if block_table is not None:
        raise refused("block_table", "None (a paged KV cache is not supported)", type(block_table).__name__)


def window(window_size: Any, causal: bool, max_seqlen_k: int) -> tuple[int, int]:
    """(left, right) with -1 for unbounded; causal is right = 0, and a bound of max_seqlen_k or more is none at all.

    Reduced here, on the host, so that equal masks take the same path and agree bit for bit.
    """
    try:
        left, right = (operator.index(bound) for bound in window_size)
    except (TypeError, ValueError):
        raise refused("window_size", "two integers (left, right)", window_size) from None
    if left < -1 or right < -1:
        raise refused("window_size", "at least -1 on both sides (-1: unbounded)", (left, right))
    if left >= 0 and left >= max_seqlen_k:
        left = -1
    if right >= 0 and right >= max_seqlen_k:
        right = -1
    return left, 0 if causal else right


def scale(softmax_scale: Any, headdim: int) -> float:
    """softmax_scale as a float, 1 / sqrt(headdim) for None."""
    if softmax_scale is None:
        return float(headdim**-0.5)
    try:
        value = float(softmax_scale)
    except (TypeError, ValueError):
        raise refused("softmax_scale", "a finite number greater than 0", softmax_scale) from None
    if not (math.isfinite(value) and value > 0):
        raise refused("softmax_scale", "a finite number greater than 0", value)
    return value


def tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise refused(name, "a tensor", type(x).__name__)


def _qkv(q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str) -> None:
    tensors(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise refused(name, f"of shape {layout}", tuple(x.shape))
        if x.dtype not in FLOATING:
            raise refused(name, "float16, bfloat16, float32 or float64", x.dtype)
        if x.dtype != q.dtype:
            raise refused(name, f"of q's dtype {q.dtype}", x.dtype)
        if x.device != q.device:
            raise refused(name, f"on q's device {q.device}", x.device)
    if v.shape != k.shape:
        raise refused("v", f"of k's shape {tuple(k.shape)}", tuple(v.shape))
    if k.shape[-1] != q.shape[-1]:
        raise refused("k", f"of q's headdim {q.shape[-1]}", k.shape[-1])
    if q.shape[-1] == 0:
        raise refused("q", "of a headdim of at least 1", q.shape[-1])
    nheads_q, nheads_kv = q.shape[-2], k.shape[-2]
    if nheads_kv == 0 or nheads_q == 0 or nheads_q % nheads_kv:
        raise refused("nheads_q", f"a positive multiple of nheads_kv ({nheads_kv})", nheads_q)


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    _qkv(q, k, v, 4, "(batch, seqlen, nheads, headdim)")
    if k.shape[0] != q.shape[0]:
        raise refused("k", f"of q's batch {q.shape[0]}", k.shape[0])


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    _qkv(q, k, v, 3, "(total_tokens, nheads, headdim)")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, Tensor):
            raise refused(name, "a tensor", type(cu).__name__)
        if cu.dtype != torch.int32:
            raise refused(name, "int32", cu.dtype)
        if cu.device != q.device:
            raise refused(name, f"on q's device {q.device}", cu.device)
        if cu.dim() != 1 or cu.shape[0] == 0:
            raise refused(name, "of shape (batch + 1,)", tuple(cu.shape))
        if cu.shape[0] > 1 and cu.stride(0) != 1:
            raise refused(name, "contiguous", f"stride {cu.stride()}")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        rule = f"of cu_seqlens_q's shape {tuple(cu_seqlens_q.shape)}"
        raise refused("cu_seqlens_k", rule, tuple(cu_seqlens_k.shape))
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest < 0:
            raise refused(name, "at least 0", longest)


def offsets(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The values of cu_seqlens, checked. Synchronises when they are on a GPU."""
    values: list[int] = cu_seqlens.tolist()
    if values[0] != 0:
        raise refused(f"{name}[0]", "0", values[0])
    for i in range(1, len(values)):
        if values[i - 1] > values[i]:
            raise refused(name, "non-decreasing", f"{values[i - 1]} before {values[i]} at index {i}")
    if values[-1] > total:
        raise refused(f"{name}[-1]", f"at most the number of tokens ({total})", values[-1])
    return values


def values_wanted() -> bool:
    """FA2_CHECK=1: also check values, accepting the synchronisation. Under torch.compile there are none to read."""
    return not torch.compiler.is_compiling() and os.environ.get("FA2_CHECK", "0") not in ("", "0")


def varlen_values(name: str, cu_seqlens: Tensor, total: int, max_name: str, max_seqlen: int) -> None:
    values = offsets(name, cu_seqlens, total)
    longest = max((b - a for a, b in itertools.pairwise(values)), default=0)
    if max_seqlen < longest:
        raise refused(max_name, f"at least the longest sequence ({longest})", max_seqlen)
