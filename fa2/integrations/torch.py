"""fa2 as a flash attention implementation of PyTorch: torch's flash operators, translated into fa2's and back.

Knows torch's operators and `fa2.ops`, no model. The translations are plain functions that run on any device; only
`activate` touches the dispatcher. What fa2 does not have goes to torch's own operator, with one log line for each
reason.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fa2 import checks
from fa2.interface import _need_kernel

NAME = "fa2"
_log = logging.getLogger("fa2")
_fa2 = torch.ops.fa2


class Unsupported(Exception):
    """fa2 does not compute this; the message is the reason, without values, so that it is logged once."""


# --- translations. Each has the arguments and the results of the aten operator it stands for.


def _serve(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None, others: dict[str, Any]) -> float:
    """softmax_scale, when fa2 serves these inputs. A missing CUDA kernel is an error, not a reason to fall through.

    Raises:
        Unsupported: torch's own operator is to run.
        RuntimeError: no CUDA kernel serves this GPU, or the extension cannot be built.
    """
    if dropout_p != 0.0:
        raise Unsupported("dropout_p is not 0")
    for name, value in others.items():
        if value is not None and value is not False:
            raise Unsupported(f"{name} is given")
    headdim = q.shape[-1]
    if k.shape != v.shape or k.shape[-1] != headdim:
        raise Unsupported("key, value and query differ in headdim")
    if q.device.type not in checks.HOST_DEVICES:
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise Unsupported("the dtype is neither float16 nor bfloat16")
        if headdim % 8 or headdim > checks.MAX_HEADDIM:
            raise Unsupported(f"headdim is no multiple of 8 up to {checks.MAX_HEADDIM}")
    if scale is not None and not scale > 0:
        raise Unsupported("scale is not positive")
    _need_kernel(q, headdim)
    return checks.scale(scale, headdim)


def _window(left: int | None, right: int | None, causal: bool, max_seqlen_k: int) -> tuple[int, int]:
    """torch's window bounds, None or negative for unbounded, as fa2's operators take them."""
    sides = (-1 if left is None else max(left, -1), -1 if right is None else max(right, -1))
    return checks.window(sides, causal, max_seqlen_k)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides of torch.empty_like(like): compiled code has been promised them and checks."""
    if x.stride() == like.stride():
        return x
    promised = torch.empty_like(like)
    return x if promised.stride() == x.stride() else promised.copy_(x)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state (2,), the unused offset () and the debug mask (0,) of a call without dropout; nothing reads them."""
    empty = torch.empty
    return (
        empty(2, dtype=torch.uint64, device=q.device),
        empty((), dtype=torch.uint64, device=q.device),
        empty(0, dtype=q.dtype, device=q.device),
    )


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention.

    Args:
        query: (batch, nheads_q, seqlen_q, headdim).
        key, value: (batch, nheads_kv, seqlen_k, headdim); nheads_kv divides nheads_q.
        is_causal: aligned to the bottom right, as in every flash operator. (scaled_dot_product_attention aligns to the
            top left, and so takes the flash backend for causal masks of equal lengths only.)
        scale: None: 1 / sqrt(headdim).
        dropout_p, return_debug_mask, others: only their defaults.

    Returns:
        out in query's shape and layout, logsumexp (batch, nheads_q, seqlen_q) float32, None, None, seqlen_q, seqlen_k,
        and three tensors that only dropout would fill. logsumexp of a row without keys is -inf (torch's own: +inf).

    Raises:
        Unsupported: torch's own operator is to run.
    """
    scale = _serve(query, key, value, dropout_p, scale, {"return_debug_mask": return_debug_mask, **others})
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = _fa2.fwd(q, k, v, scale, -1, 0 if is_causal else -1)
    return _laid_out(out.transpose(1, 2), query), lse, None, None, seqlen_q, seqlen_k, *_no_dropout(query)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_backward.

    Args:
        grad_out, out: (batch, nheads_q, seqlen_q, headdim); logsumexp (batch, nheads_q, seqlen_q) float32.
        The others: as `sdpa_forward`; cum_seq_q, cum_seq_k, max_q, max_k and the philox tensors are not read.

    Returns:
        The gradients of query, key and value, in their shapes and layouts; deterministic under
        `torch.use_deterministic_algorithms(True)`.

    Raises:
        Unsupported: torch's own operator is to run.
    """
    scale = _serve(query, key, value, dropout_p, scale, others)
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    mask = (scale, -1, 0 if is_causal else -1)
    grads = _fa2.bwd(dout, q, k, v, o, logsumexp, *mask, torch.are_deterministic_algorithms_enabled())
    dq, dk, dv = (_laid_out(grad.transpose(1, 2), x) for grad, x in zip(grads, (query, key, value), strict=True))
    return dq, dk, dv


def _cu_seqlens(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The two cu_seqlens of packed sequences, None for the dense layout."""
    if cum_seq_q is None and cum_seq_k is None:
        return None
    if cum_seq_q is None or cum_seq_k is None:
        raise Unsupported("only one of cum_seq_q and cum_seq_k is given")
    return cum_seq_q.contiguous(), cum_seq_k.contiguous()


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    num_splits: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """aten::_flash_attention_forward, which varlen_attn and jagged nested tensors call.

    Args:
        query: (total_q, nheads_q, headdim) with cum_seq_q, else (batch, seqlen_q, nheads_q, headdim).
        key, value: (total_k, nheads_kv, headdim) with cum_seq_k, else (batch, seqlen_k, nheads_kv, headdim).
        cum_seq_q, cum_seq_k: (batch + 1,) int32, or both None.
        max_q, max_k: at least the longest sequence; not read for the dense layout.
        window_size_left, window_size_right: inclusive, aligned to the bottom right; None or -1: unbounded.
        num_splits: None, 0 or 1.
        dropout_p, return_debug_mask, others (seqused_k, alibi_slopes, block_table): only their defaults.

    Returns:
        out in query's shape and layout; logsumexp float32, (nheads_q, total_q) or (batch, nheads_q, seqlen_q); three
        tensors that only dropout would fill.

    Raises:
        Unsupported: torch's own operator is to run.
    """
    if num_splits is not None and num_splits > 1:
        raise Unsupported("num_splits is more than 1")
    scale = _serve(query, key, value, dropout_p, scale, {"return_debug_mask": return_debug_mask, **others})
    cu_seqlens = _cu_seqlens(cum_seq_q, cum_seq_k)
    if cu_seqlens is None:
        mask = _window(window_size_left, window_size_right, is_causal, key.shape[1])
        out, lse = _fa2.fwd(query, key, value, scale, *mask)
    else:
        mask = _window(window_size_left, window_size_right, is_causal, max_k)
        out, lse = _fa2.fwd_varlen(query, key, value, *cu_seqlens, max_q, max_k, scale, *mask)
    return _laid_out(out, query), lse, *_no_dropout(query)


def flash_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace, which varlen_attn_out calls: `flash_forward`, copied to out.

    Returns:
        logsumexp, as `flash_forward`.

    Raises:
        Unsupported: torch's own operator is to run.
    """
    result, lse, *_ = flash_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_flash_attention_backward.

    Args:
        grad_out, out: query's shape; logsumexp as `flash_forward` returns it.
        The others: as `flash_forward`; rng_state and unused are not read.

    Returns:
        The gradients of query, key and value, in their shapes and layouts; deterministic under
        `torch.use_deterministic_algorithms(True)`.

    Raises:
        Unsupported: torch's own operator is to run.
    """
    scale = _serve(query, key, value, dropout_p, scale, others)
    deterministic = torch.are_deterministic_algorithms_enabled()
    inputs = (grad_out, query, key, value, out, logsumexp)
    cu_seqlens = _cu_seqlens(cum_seq_q, cum_seq_k)
    if cu_seqlens is None:
        mask = _window(window_size_left, window_size_right, is_causal, key.shape[1])
        grads = _fa2.bwd(*inputs, scale, *mask, deterministic)
    else:
        mask = _window(window_size_left, window_size_right, is_causal, max_k)
        grads = _fa2.bwd_varlen(*inputs, *cu_seqlens, max_q, max_k, scale, *mask, deterministic)
    dq, dk, dv = (_laid_out(grad, x) for grad, x in zip(grads, (query, key, value), strict=True))
    return dq, dk, dv


TRANSLATIONS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,  # torch >= 2.12
    "_flash_attention_backward": flash_backward,
}


# --- the dispatcher

# torch has no flash operators for CPU tensors, so there varlen_attn works only while fa2 is active.
# (scaled_dot_product_attention has an operator of its own for them, which stays.)
DISPATCH_KEYS = ("CUDA", "CPU")
_said: set[str] = set()


def _or_torch(translate: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """The kernel to register: the translation, or torch's own kernel where fa2 does not compute what is asked for."""

    def kernel(dispatch_keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return translate(*args, **kwargs)
        except Unsupported as unsupported:
            reason = str(unsupported)
            if original is None:
                raise RuntimeError(f"fa2: not supported, and torch has no flash attention here: {reason}") from None
        if reason not in _said:
            _said.add(reason)
            _log.warning("fa2: torch's own flash attention runs where %s", reason)
        return original.call_boxed(dispatch_keys, *args, **kwargs)

    return kernel


class Activation:
    """What `torch.nn.attention.restore_flash_attention_impl` calls `remove` of."""

    def __init__(self, library: Library, cudnn: bool) -> None:
        self._library, self._cudnn = library, cudnn

    def remove(self) -> None:
        """torch's own kernels are back, and the cuDNN backend where it was on."""
        self._library._destroy()
        torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


def activate() -> Activation:
    """Put the translations in front of torch's flash operators, and switch the cuDNN backend off.

    scaled_dot_product_attention asks the cuDNN backend before the flash one on Hopper, and would never come here.
    """
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # That a kernel is overridden is the point; torch would say so.
        warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel")
        for name, translate in TRANSLATIONS.items():
            if not hasattr(torch.ops.aten, name):
                continue
            qualified = f"aten::{name}"
            for key in DISPATCH_KEYS:
                there = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)
                original = torch.library.get_kernel(qualified, key) if there else None
                library.impl(name, _or_torch(translate, original), key, with_keyset=True)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Activation(library, cudnn)


def register() -> None:
    """`fa2.integrations.register_with_torch`."""
    attention: Any = torch.nn.attention
    needed = ("register_flash_attention_impl", "activate_flash_attention_impl", "restore_flash_attention_impl")
    if not all(hasattr(attention, name) for name in needed) or not hasattr(torch.library, "get_kernel"):
        rule = "a version with torch.nn.attention.register_flash_attention_impl (2.11 or later)"
        raise RuntimeError(f"fa2: torch must be {rule}, got {torch.__version__}")
    attention.register_flash_attention_impl(NAME, register_fn=activate)
