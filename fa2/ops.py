"""The `torch.ops.fa2` operators: schemas, fake kernels, the CPU kernels, autograd and FLOP formulas. The schemas live
here, not in the extension, so that the operators exist on every machine; the extension adds the CUDA kernels
(`csrc/api.cpp`).

Masks reach an operator as (window_left, window_right) alone, -1 for unbounded: causal is window_right = 0.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from fa2 import cpu, reference

_library = torch.library.Library("fa2", "DEF")
_MASK = "float softmax_scale, int window_left, int window_right"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k"
SCHEMAS = (
    f"fwd(Tensor q, Tensor k, Tensor v, {_MASK}) -> (Tensor out, Tensor softmax_lse)",
    f"fwd_varlen(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_MASK}) -> (Tensor out, Tensor softmax_lse)",
    f"bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {_MASK}, bool deterministic)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    f"bwd_varlen(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {_LENGTHS}, {_MASK},"
    " bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)",
    f"bwd_qkvpacked(Tensor dout, Tensor qkv, Tensor out, Tensor softmax_lse, {_MASK}, bool deterministic)"
    " -> Tensor dqkv",
    "bwd_varlen_qkvpacked(Tensor dout, Tensor qkv, Tensor out, Tensor softmax_lse, Tensor cu_seqlens, int max_seqlen,"
    f" {_MASK}, bool deterministic) -> Tensor dqkv",
)
for _schema in SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# --- what the operators return, for tracing. Everything is contiguous, whatever the inputs' strides.


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("fa2::fwd", lib=_library)
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return _like(q), q.new_empty((b, h, s), dtype=reference.compute_dtype(q.dtype))


@torch.library.register_fake("fa2::fwd_varlen", lib=_library)
def _fwd_varlen_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    t, h, _ = q.shape
    return _like(q), q.new_empty((h, t), dtype=reference.compute_dtype(q.dtype))


@torch.library.register_fake("fa2::bwd", lib=_library)
@torch.library.register_fake("fa2::bwd_varlen", lib=_library)
def _bwd_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


@torch.library.register_fake("fa2::bwd_qkvpacked", lib=_library)
@torch.library.register_fake("fa2::bwd_varlen_qkvpacked", lib=_library)
def _bwd_qkvpacked_fake(dout: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return _like(qkv)


# --- CPU kernels


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    return reference.dense_forward(q, k, v, scale, left, right, cpu.attend)


def _fwd_varlen_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    return reference.varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, cpu.attend)


def _bwd_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.dense_backward(dout, q, k, v, out, lse, scale, left, right, cpu.attend_backward)


def _bwd_varlen_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.varlen_backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, scale, left, right, cpu.attend_backward
    )


def _bwd_qkvpacked_cpu(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *mask: Any) -> Tensor:
    q, k, v = qkv.unbind(-3)
    return torch.stack(_bwd_cpu(dout, q, k, v, out, lse, *mask), dim=-3)


def _bwd_varlen_qkvpacked_cpu(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int, *mask: Any
) -> Tensor:
    q, k, v = qkv.unbind(-3)
    dqkv = _bwd_varlen_cpu(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *mask)
    return torch.stack(dqkv, dim=-3)


for _name, _kernel in (
    ("fwd", _fwd_cpu),
    ("fwd_varlen", _fwd_varlen_cpu),
    ("bwd", _bwd_cpu),
    ("bwd_varlen", _bwd_varlen_cpu),
    ("bwd_qkvpacked", _bwd_qkvpacked_cpu),
    ("bwd_varlen_qkvpacked", _bwd_varlen_qkvpacked_cpu),
):
    _library.impl(_name, _kernel, "CPU")


# --- autograd. Functions over the operators, not `register_autograd`, which takes four times as long a call. To the
# same end what is no tensor comes as one tuple (each argument costs, in `apply` and again in the backward), and lse,
# which carries no gradient, is returned only when asked for: the engine would make zeros for its gradient, on the GPU.

_fwd = torch.ops.fa2.fwd.default
_fwd_varlen = torch.ops.fa2.fwd_varlen.default
_bwd = torch.ops.fa2.bwd.default
_bwd_varlen = torch.ops.fa2.bwd_varlen.default
_bwd_qkvpacked = torch.ops.fa2.bwd_qkvpacked.default
_bwd_varlen_qkvpacked = torch.ops.fa2.bwd_varlen_qkvpacked.default

Mask = tuple[float, int, int]  # softmax_scale, window_left, window_right


def _differentiable_once(backward: Any) -> Any:
    """A second derivative is an error instead of a wrong number.

    `once_differentiable` where a graph of the backward is being made; elsewhere its no_grad would change nothing.
    """
    guarded = once_differentiable(backward)

    def once(ctx: Any, *grads: Tensor) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return once


class _Unused:
    """What a forward keeps for its backward, where there will be none."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass

    mark_non_differentiable = save_for_backward


def _result(ctx: Any, out: Tensor, lse: Tensor, with_lse: bool) -> Any:
    if not with_lse:
        return out
    ctx.mark_non_differentiable(lse)
    return out, lse


class Dense(torch.autograd.Function):
    """out, or (out, lse), of the dense layout, differentiable in q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, deterministic: bool, with_lse: bool) -> Any:
        out, lse = _fwd(q, k, v, *mask)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (*mask, deterministic)
        return _result(ctx, out, lse, with_lse)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, dout: Tensor, *_dlse: Tensor) -> Any:
        return *_bwd(dout, *ctx.saved_tensors, *ctx.rest), None, None, None


class Varlen(torch.autograd.Function):
    """out, or (out, lse), of the varlen layout, differentiable in q, k and v.

    cu_seqlens_k is None where it is cu_seqlens_q itself: Dynamo refuses a Function that is given one tensor twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        rest: tuple[int, int, float, int, int],
        deterministic: bool,
        with_lse: bool,
    ) -> Any:
        """rest: max_seqlen_q, max_seqlen_k and the mask."""
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        out, lse = _fwd_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.rest = (*rest, deterministic)
        return _result(ctx, out, lse, with_lse)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, dout: Tensor, *_dlse: Tensor) -> Any:
        return *_bwd_varlen(dout, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


class DenseQkvpacked(torch.autograd.Function):
    """As Dense, of qkv (batch, seqlen, 3, nheads, headdim): its gradient is one tensor, written in place."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Mask, deterministic: bool, with_lse: bool) -> Any:
        out, lse = _fwd(*qkv.unbind(-3), *mask)
        ctx.save_for_backward(qkv, out, lse)
        ctx.rest = (*mask, deterministic)
        return _result(ctx, out, lse, with_lse)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, dout: Tensor, *_dlse: Tensor) -> Any:
        return _bwd_qkvpacked(dout, *ctx.saved_tensors, *ctx.rest), None, None, None


class VarlenQkvpacked(torch.autograd.Function):
    """As Varlen, of qkv (total, 3, nheads, headdim): its gradient is one tensor, written in place."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, mask: Mask, deterministic: bool, with_lse: bool
    ) -> Any:
        out, lse = _fwd_varlen(*qkv.unbind(-3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *mask)
        ctx.save_for_backward(qkv, out, lse, cu_seqlens)
        ctx.rest = (max_seqlen, *mask, deterministic)
        return _result(ctx, out, lse, with_lse)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, dout: Tensor, *_dlse: Tensor) -> Any:
        return _bwd_varlen_qkvpacked(dout, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


_requires_grad = operator.attrgetter("requires_grad")


def _bare_apply(function: Any) -> Any:
    """apply below torch.autograd.Function's own, which looks at every argument for transforms of torch.func."""
    return super(torch.autograd.Function, function).apply


_apply = {function: _bare_apply(function) for function in (Dense, Varlen, DenseQkvpacked, VarlenQkvpacked)}


def apply(function: Any, tensors: Sequence[Tensor], *rest: Any) -> Any:
    """function.apply(*tensors, *rest) by the shortest way: apply costs more than the operator it wraps.

    Without a gradient to come it is the forward alone. Forward-mode derivatives and torch.func are left to
    torch.autograd.Function, which refuses them, and tracing to Dynamo.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return function.apply(*tensors, *rest)
    if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
        return _apply[function](*tensors, *rest)
    return function.forward(_Unused(), *tensors, *rest)


# --- FLOPs for FlopCounterMode, in torch's convention for attention: the mask is not counted off, the backward is 2.5
# times the forward. Varlen counts the true lengths where cu_seqlens can be read, the longest possible ones where not.


def _heads_first(shape: Any) -> tuple[int, ...]:
    b, s, h, d = shape
    return (b, h, s, d)


@register_flop_formula(torch.ops.fa2.fwd)
def _fwd_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    b, h, sq, d = _heads_first(q)
    return sdpa_flop_count((b, h, sq, d), (b, h, k[1], d), (b, h, k[1], d))


@register_flop_formula(torch.ops.fa2.bwd)
def _bwd_flops(dout: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    b, h, sq, d = _heads_first(q)
    q_shape, k_shape = (b, h, sq, d), (b, h, k[1], d)
    return sdpa_backward_flop_count(q_shape, q_shape, k_shape, k_shape)


def _lengths(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> list[tuple[int, int]]:
    if isinstance(cu_q, torch._subclasses.FakeTensor) or cu_q.is_meta:
        n = max(1, -(-q.shape[0] // max(1, max_q)))
        return [(min(max_q, q.shape[0]), min(max_k, k.shape[0]))] * n
    q_lengths, k_lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
    return list(zip(q_lengths, k_lengths, strict=True))


@register_flop_formula(torch.ops.fa2.fwd_varlen, get_raw=True)
def _fwd_varlen_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *args: Any, **kwargs: Any
) -> int:
    _, h, d = q.shape
    lengths = _lengths(q, k, cu_q, cu_k, max_q, max_k)
    return sum(sdpa_flop_count((1, h, m, d), (1, h, n, d), (1, h, n, d)) for m, n in lengths)


@register_flop_formula(torch.ops.fa2.bwd_varlen, get_raw=True)
def _bwd_varlen_flops(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    _, h, d = q.shape
    lengths = _lengths(q, k, cu_q, cu_k, max_q, max_k)
    return sum(sdpa_backward_flop_count((1, h, m, d), (1, h, m, d), (1, h, n, d), (1, h, n, d)) for m, n in lengths)


@register_flop_formula(torch.ops.fa2.bwd_qkvpacked)
def _bwd_qkvpacked_flops(dout: Any, qkv: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    b, s, _, h, d = qkv
    return sdpa_backward_flop_count(*[(b, h, s, d)] * 4)


@register_flop_formula(torch.ops.fa2.bwd_varlen_qkvpacked, get_raw=True)
def _bwd_varlen_qkvpacked_flops(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu: Tensor, longest: int, *args: Any, **kwargs: Any
) -> int:
    q, k, v = qkv.unbind(-3)
    return _bwd_varlen_flops(dout, q, k, v, out, lse, cu, cu, longest, longest)
