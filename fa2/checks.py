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
    dropout_p: float = 0.0, softcap: float = 0.0, alibi_slopes: Tensor | None = None, block_table: Any = None
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
        left, right = window_size
        left, right = operator.index(left), operator.index(right)
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
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        return
    name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, Tensor))
    raise refused(name, "a tensor", type(x).__name__)


def _qkv(q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str) -> tuple[Any, Any]:
    """Returns the shapes of q and k. Every attribute is read once: such reads are what a check costs."""
    dtype, device, shape_q, shape_k, shape_v = q.dtype, q.device, q.shape, k.shape, v.shape
    if dtype not in FLOATING:
        raise refused("q", "float16, bfloat16, float32 or float64", dtype)
    if not len(shape_q) == len(shape_k) == len(shape_v) == dims:
        name, shape = next((n, s) for n, s in zip("qkv", (shape_q, shape_k, shape_v), strict=True) if len(s) != dims)
        raise refused(name, f"of shape {layout}", tuple(shape))
    if k.dtype != dtype or v.dtype != dtype:
        name, x = ("v", v) if k.dtype == dtype else ("k", k)
        raise refused(name, f"of q's dtype {dtype}", x.dtype)
    if k.device != device or v.device != device:
        name, x = ("v", v) if k.device == device else ("k", k)
        raise refused(name, f"on q's device {device}", x.device)
    if shape_v != shape_k:
        raise refused("v", f"of k's shape {tuple(shape_k)}", tuple(shape_v))
    nheads_q, headdim, nheads_kv = shape_q[-2], shape_q[-1], shape_k[-2]
    if shape_k[-1] != headdim:
        raise refused("k", f"of q's headdim {headdim}", shape_k[-1])
    if headdim == 0:
        raise refused("q", "of a headdim of at least 1", headdim)
    if nheads_kv == 0 or nheads_q == 0 or nheads_q % nheads_kv:
        raise refused("nheads_q", f"a positive multiple of nheads_kv ({nheads_kv})", nheads_q)
    return shape_q, shape_k


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    shape_q, shape_k = _qkv(q, k, v, 4, "(batch, seqlen, nheads, headdim)")
    if shape_k[0] != shape_q[0]:
        raise refused("k", f"of q's batch {shape_q[0]}", shape_k[0])


def _cu_seqlens(name: str, cu_seqlens: Any, device: torch.device) -> Any:
    if not isinstance(cu_seqlens, Tensor):
        raise refused(name, "a tensor", type(cu_seqlens).__name__)
    if cu_seqlens.dtype != torch.int32:
        raise refused(name, "int32", cu_seqlens.dtype)
    if cu_seqlens.device != device:
        raise refused(name, f"on q's device {device}", cu_seqlens.device)
    shape = cu_seqlens.shape
    if len(shape) != 1 or shape[0] == 0:
        raise refused(name, "of shape (batch + 1,)", tuple(shape))
    if not cu_seqlens.is_contiguous():
        raise refused(name, "contiguous", f"stride {cu_seqlens.stride()}")
    return shape


def _at_least_0(name: str, max_seqlen: int) -> None:
    if max_seqlen < 0:
        raise refused(name, "at least 0", max_seqlen)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    _qkv(q, k, v, 3, "(total_tokens, nheads, headdim)")
    shape = _cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_k is not cu_seqlens_q:
        shape_k = _cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
        if shape_k != shape:
            raise refused("cu_seqlens_k", f"of cu_seqlens_q's shape {tuple(shape)}", tuple(shape_k))
    _at_least_0("max_seqlen_q", max_seqlen_q)
    _at_least_0("max_seqlen_k", max_seqlen_k)


def packed(name: str, x: Any, parts: int, dims: int, layout: str) -> None:
    """A tensor that holds q, k and v, or k and v, side by side: dims dimensions, parts of them third from last."""
    if not isinstance(x, Tensor):
        raise refused(name, "a tensor", type(x).__name__)
    shape = x.shape
    if len(shape) != dims or shape[-3] != parts:
        raise refused(name, f"of shape {layout}", tuple(shape))
    if x.dtype not in FLOATING:
        raise refused(name, "float16, bfloat16, float32 or float64", x.dtype)
    if shape[-1] == 0:
        raise refused(name, "of a headdim of at least 1", 0)
    if shape[-2] == 0:
        raise refused(name, "of at least one head", 0)


def varlen_packed(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
    packed("qkv", qkv, 3, 4, "(total, 3, nheads, headdim)")
    _cu_seqlens("cu_seqlens", cu_seqlens, qkv.device)
    _at_least_0("max_seqlen", max_seqlen)


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


# os.environ's own dict, which assignments to os.environ (and monkeypatch.setenv) change: os.environ itself raises and
# catches a KeyError to say that it holds nothing, 1 to 2 µs of every call.
_environment: Any = getattr(os.environ, "_data", os.environ)
_FA2_CHECK: Any = "FA2_CHECK" if _environment is os.environ else os.environ.encodekey("FA2_CHECK")


def values_wanted() -> bool:
    """FA2_CHECK=1: also check values, accepting the synchronisation. Under torch.compile there are none to read."""
    if torch.compiler.is_compiling() or _FA2_CHECK not in _environment:
        return False
    return os.environ.get("FA2_CHECK", "0") not in ("", "0")


def varlen_values(name: str, cu_seqlens: Tensor, total: int, max_name: str, max_seqlen: int) -> None:
    values = offsets(name, cu_seqlens, total)
    longest = max((b - a for a, b in itertools.pairwise(values)), default=0)
    if max_seqlen < longest:
        raise refused(max_name, f"at least the longest sequence ({longest})", max_seqlen)
