"""Linear layers that may compute from a 16-bit copy of their weight and add the weight's gradient up themselves.

Autocast casts every weight in every micro-batch, and rounds every weight gradient to 16 bits before it widens it again
and adds it to `.grad`: 30 bytes a weight and micro-batch beside the products. With `WeightCopies` the cast is made once
an optimiser step, and the product that makes a weight's gradient adds it to the fp32 `.grad` unrounded. Where
`cublaslt.py` serves, it makes these products, and what stands around them in a block, sums and GELU, goes into their
epilogues. Knows tensors only; `gpt.py` builds its blocks of `Linear`, `train/module.py` owns the copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model import cublaslt
from model.gelu import gelu_tanh

_library = torch.library.Library("gpt", "DEF")
_library.define("add_product_(Tensor(a!) out, Tensor a, Tensor b) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in the dtype of `out`, in place, without rounding the product to 16 bits first.

    Args:
        out: (n, k), fp32 or the dtype of a and b.
        a: (n, t).
        b: (t, k), dtype of a.
    """
    if a.is_cuda and a.dtype != out.dtype:
        if not cublaslt.add_product(out, a.t(), b):
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)


# An operator, because tracing knows no `out=` that is also an input; it declares what it writes.
_library.impl("add_product_", add_product, "CompositeExplicitAutograd")


@torch.library.register_fake("gpt::add_product_", lib=_library)
def _add_product_fake(out: Tensor, a: Tensor, b: Tensor) -> None:
    return None


class _FromCopy(torch.autograd.Function):
    """[addend +] x @ copyᵀ + bias; the backward pass adds the weight's gradient to `weight_grad` instead of returning
    it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        copy: Tensor,
        bias: Tensor | None,
        weight_grad: Tensor,
        served: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, copy, weight_grad)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.has_addend = addend is not None
        ctx.served = served
        if served:
            return torch.ops.gpt.linear(x, copy, _as(bias, copy), addend)
        assert addend is None, "asked adds()"
        return F.linear(x, copy, _as(bias, copy))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, copy, weight_grad = ctx.saved_tensors
        torch.ops.gpt.add_product_(weight_grad, dy.t(), x)
        dx = torch.ops.gpt.product(dy, copy) if ctx.served else dy @ copy
        return dx, dy if ctx.has_addend else None, None, _bias_gradient(dy, ctx.bias_dtype), None, None


class _MlpFromCopies(torch.autograd.Function):
    """[addend +] down(gelu(up(x))), as two `_FromCopy` with all that lies between them in the products' epilogues."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        up_copy: Tensor,
        up_bias: Tensor | None,
        up_grad: Tensor,
        down_copy: Tensor,
        down_bias: Tensor | None,
        down_grad: Tensor,
    ) -> Tensor:
        hidden, up = torch.ops.gpt.linear_gelu(x, up_copy, _as(up_bias, up_copy))
        ctx.save_for_backward(x, up, hidden, up_copy, up_grad, down_copy, down_grad)
        ctx.bias_dtypes = tuple(None if bias is None else bias.dtype for bias in (up_bias, down_bias))
        ctx.has_addend = addend is not None
        return torch.ops.gpt.linear(hidden, down_copy, _as(down_bias, down_copy), addend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, up, hidden, up_copy, up_grad, down_copy, down_grad = ctx.saved_tensors
        up_dtype, down_dtype = ctx.bias_dtypes
        torch.ops.gpt.add_product_(down_grad, dy.t(), hidden)
        dup = torch.ops.gpt.gelu_backward_product(dy, down_copy, up)
        torch.ops.gpt.add_product_(up_grad, dup.t(), x)
        return (
            torch.ops.gpt.product(dup, up_copy),
            dy if ctx.has_addend else None,
            None,
            _bias_gradient(dup, up_dtype),
            None,
            None,
            _bias_gradient(dy, down_dtype),
            None,
        )


def _as(bias: Tensor | None, copy: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(copy.dtype)


def _bias_gradient(dy: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else dy.sum(0, dtype=dtype)


class Linear(nn.Linear):
    """nn.Linear over (T, in_features); the same, until `WeightCopies` gives it a copy to compute from."""

    copy: Tensor | None = None  # of `weight`, in the dtype of products
    weight_grad: Tensor | None = None  # `weight.grad` itself
    served = False  # whether `cublaslt.py` makes the products from the copy

    def forward(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """[addend +] x @ weightᵀ + bias; an addend is for where `adds` says so."""
        if self.copy is None or self.weight_grad is None:
            assert addend is None, "asked adds()"
            return super().forward(x)
        return _FromCopy.apply(x.to(self.copy.dtype), addend, self.copy, self.bias, self.weight_grad, self.is_served())

    def is_served(self) -> bool:
        """In training alone: each new shape is timed."""
        return self.served and self.copy is not None and torch.is_grad_enabled()

    def adds(self, addend: Tensor) -> bool:
        """Whether the product itself adds `addend` to what it makes."""
        return self.is_served() and self.copy is not None and addend.dtype == self.copy.dtype


def gelu_mlp(x: Tensor, up: Linear, down: Linear, addend: Tensor | None = None) -> Tensor:
    """[addend +] down(gelu(up(x))), GELU in its tanh form; an addend is for where `down.adds` says so."""
    copies = up.copy, down.copy
    if not down.is_served() or copies[0] is None or copies[1] is None:
        return down(gelu_tanh(up(x)), addend)
    return _MlpFromCopies.apply(
        x.to(copies[0].dtype), addend, copies[0], up.bias, up.weight_grad, copies[1], down.bias, down.weight_grad
    )


class WeightCopies:
    """Copies of the weights of all `Linear` layers of a model in the dtype of products, made once an optimiser step.

    The parameters stay what they are: optimiser, clipping and checkpoints see them and their fp32 `.grad`, which from
    here on is one buffer that is never freed. What has no copy (embeddings, norms, biases) accumulates there through
    autograd, in place. Not for gradients that hooks reduce over ranks: the weights' do not pass through autograd.

    Args:
        model: on its device, with the weights to train from.
        dtype: of the copies.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.parameters = list(model.parameters())
        self.linears = [module for module in model.modules() if isinstance(module, Linear)]
        self._weights: list[Tensor] = [linear.weight for linear in self.linears]
        self._copies = [torch.empty_like(weight, dtype=dtype, requires_grad=False) for weight in self._weights]
        self._gradients = [torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for linear, copy in zip(self.linears, self._copies, strict=True):
            linear.copy, linear.weight_grad = copy, linear.weight.grad
            linear.served = cublaslt.why_unavailable(copy.device, dtype) is None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameters' present values: after each change to them."""
        torch._foreach_copy_(self._copies, self._weights)

    def zero_gradients(self) -> None:
        """As `optimizer.zero_grad()`, which would let go of the buffers."""
        torch._foreach_zero_(self._gradients)

    def release(self) -> None:
        """The model as it was: products from the parameters, no gradients."""
        for linear in self.linears:
            linear.copy = linear.weight_grad = None
            linear.served = False
        for parameter in self.parameters:
            parameter.grad = None
