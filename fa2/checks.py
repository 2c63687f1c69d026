"""What the public functions refuse, each with one sentence: "fa2: <argument> must be <rule>, got <value>".

Shapes, dtypes and devices are always checked. Values of cu_seqlens are on the device, so they are checked where reading
them is free (CPU tensors), and on a GPU only with FA2_CHECK=1, which synchronises.
"""

from __future__ import annotations

import itertools
import operator
import os
from typing import Any

import torch
from torch import Tensor

MAX_HEADDIM = 256
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require(ok: bool, argument: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"fa2: {argument} must be {rule}, got {value}")


def options(
    *, dropout_p: float = 0.0, softcap: float = 0.0, alibi_slopes: Tensor | None = None, block_table: Any = None
) -> None:
    """Options of flash_attn that no kernel here has: refused, never ignored."""
    require(dropout_p == 0.0, "dropout_p", "0.0 (attention dropout is not supported)", dropout_p)
    require(softcap == 0.0, "softcap", "0.0 (soft-capped scores are not supported)", softcap)
    require(alibi_slopes is None, "alibi_slopes", "None (ALiBi is not supported)", type(alibi_slopes).__name__)
    require(block_table is None, "block_table", "None (a paged KV cache is not supported)", type(block_table).__name__)


def window(window_size: Any, causal: bool, max_seqlen_k: int) -> tuple[int, int]:
    """(left, right) with -1 for unbounded; causal is right = 0, and a bound of max_seqlen_k or more is none at all.

    Reduced here, on the host, so that equal masks take the same path and agree bit for bit.
    """
    try:
        left, right = (operator.index(bound) for bound in window_size)
    except (TypeError, ValueError):
        raise ValueError(f"fa2: window_size must be two integers (left, right), got {window_size!r}") from None
    require(left >= -1 and right >= -1, "window_size", "at least -1 on both sides (-1: unbounded)", (left, right))
    if left >= max_seqlen_k:
        left = -1
    if right >= max_seqlen_k:
        right = -1
    return left, 0 if causal else right


def _tensors(q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
        require(x.dim() == dims, name, f"of shape {layout}", tuple(x.shape))
        require(x.dtype in FLOATING, name, "float16, bfloat16, float32 or float64", x.dtype)
    for name, x in (("k", k), ("v", v)):
        require(x.dtype == q.dtype, name, f"of q's dtype {q.dtype}", x.dtype)
        require(x.device == q.device, name, f"on q's device {q.device}", x.device)
    require(v.shape == k.shape, "v", f"of k's shape {tuple(k.shape)}", tuple(v.shape))
    require(k.shape[-1] == q.shape[-1], "k", f"of q's headdim {q.shape[-1]}", k.shape[-1])
    require(q.shape[-1] > 0, "q", "of a headdim of at least 1", q.shape[-1])
    nheads_q, nheads_kv = q.shape[-2], k.shape[-2]
    require(
        nheads_kv > 0 and nheads_q > 0 and nheads_q % nheads_kv == 0,
        "nheads_q",
        f"a positive multiple of nheads_kv ({nheads_kv})",
        nheads_q,
    )


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    _tensors(q, k, v, 4, "(batch, seqlen, nheads, headdim)")
    require(k.shape[0] == q.shape[0], "k", f"of q's batch {q.shape[0]}", k.shape[0])


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    _tensors(q, k, v, 3, "(total_tokens, nheads, headdim)")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        require(isinstance(cu, Tensor), name, "a tensor", type(cu).__name__)
        require(cu.dtype == torch.int32, name, "int32", cu.dtype)
        require(cu.device == q.device, name, f"on q's device {q.device}", cu.device)
        require(cu.dim() == 1 and cu.shape[0] >= 1, name, "of shape (batch + 1,)", tuple(cu.shape))
        require(cu.shape[0] == 1 or cu.stride(0) == 1, name, "contiguous", f"stride {cu.stride()}")
    require(
        cu_seqlens_k.shape == cu_seqlens_q.shape,
        "cu_seqlens_k",
        f"of cu_seqlens_q's shape {tuple(cu_seqlens_q.shape)}",
        tuple(cu_seqlens_k.shape),
    )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        require(longest >= 0, name, "at least 0", longest)


def offsets(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The values of cu_seqlens, checked. Synchronises when they are on a GPU."""
    values: list[int] = cu_seqlens.tolist()
    require(values[0] == 0, f"{name}[0]", "0", values[0])
    for i in range(1, len(values)):
        require(values[i - 1] <= values[i], name, "non-decreasing", f"{values[i - 1]} before {values[i]} at index {i}")
    require(values[-1] <= total, f"{name}[-1]", f"at most the number of tokens ({total})", values[-1])
    return values


def values_wanted() -> bool:
    """FA2_CHECK=1: also check values, accepting the synchronisation. Under torch.compile there are none to read."""
    return not torch.compiler.is_compiling() and os.environ.get("FA2_CHECK", "0") not in ("", "0")


def varlen_values(name: str, cu_seqlens: Tensor, total: int, max_name: str, max_seqlen: int) -> None:
    values = offsets(name, cu_seqlens, total)
    longest = max((b - a for a, b in itertools.pairwise(values)), default=0)
    require(max_seqlen >= longest, max_name, f"at least the longest sequence ({longest})", max_seqlen)
