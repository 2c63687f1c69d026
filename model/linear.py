"""Linear layers that may compute from a 16-bit copy of their weight and add the weight's gradient up themselves.

Autocast casts every weight in every micro-batch, and rounds every weight gradient to 16 bits before it widens it again
and adds it to `.grad`: 30 bytes a weight and micro-batch beside the products. With `WeightCopies` the cast is made once
an optimiser step, and the product that makes a weight's gradient adds it to the fp32 `.grad` unrounded. The product
behind a GELU multiplies by its derivative on the way back, where `cublaslt.py` can.
Knows tensors only; `gpt.py` builds its blocks of `Linear`, `train/module.py` owns the copies.
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
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)


# An operator, because tracing knows no `out=` that is also an input; it declares what it writes.
_library.impl("add_product_", add_product, "CompositeExplicitAutograd")


@torch.library.register_fake("gpt::add_product_", lib=_library)
def _add_product_fake(out: Tensor, a: Tensor, b: Tensor) -> None:
    return None


class _FromCopy(torch.autograd.Function):
    """x @ copyᵀ + bias; the backward pass adds the weight's gradient to `weight_grad` instead of returning it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Tensor, bias: Tensor | None, weight_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, copy, weight_grad)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, copy, None if bias is None else bias.to(copy.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, copy, weight_grad = ctx.saved_tensors
        torch.ops.gpt.add_product_(weight_grad, dy.t(), x)
        dbias = None if ctx.bias_dtype is None else dy.sum(0, dtype=ctx.bias_dtype)
        return dy @ copy, None, dbias, None


class _FromCopyAfterGelu(torch.autograd.Function):
    """gelu(up) @ copyᵀ + bias, as `_FromCopy`; up's gradient comes out of a product, GELU's derivative in it."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, copy: Tensor, bias: Tensor | None, weight_grad: Tensor) -> Tensor:
        x = gelu_tanh(up)
        ctx.save_for_backward(up, x, copy, weight_grad)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, copy, None if bias is None else bias.to(copy.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        up, x, copy, weight_grad = ctx.saved_tensors
        torch.ops.gpt.add_product_(weight_grad, dy.t(), x)
        dbias = None if ctx.bias_dtype is None else dy.sum(0, dtype=ctx.bias_dtype)
        return torch.ops.gpt.gelu_backward_product(dy, copy, up), None, dbias, None


class Linear(nn.Linear):
    """nn.Linear over (T, in_features); the same, until `WeightCopies` gives it a copy to compute from."""

    copy: Tensor | None = None  # of `weight`, in the dtype of products
    weight_grad: Tensor | None = None  # `weight.grad` itself
    multiplies_by_gelus_derivative = False  # in the product that makes the gradient of its input

    def forward(self, x: Tensor) -> Tensor:
        if self.copy is None or self.weight_grad is None:
            return super().forward(x)
        return _FromCopy.apply(x.to(self.copy.dtype), self.copy, self.bias, self.weight_grad)

    def after_gelu(self, up: Tensor) -> Tensor:
        """self(gelu(up)), GELU in its tanh form."""
        if self.copy is None or self.weight_grad is None or not self.multiplies_by_gelus_derivative:
            return self(gelu_tanh(up))
        return _FromCopyAfterGelu.apply(up.to(self.copy.dtype), self.copy, self.bias, self.weight_grad)


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
            linear.multiplies_by_gelus_derivative = cublaslt.why_unavailable(copy.device, dtype) is None
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
            linear.multiplies_by_gelus_derivative = False
        for parameter in self.parameters:
            parameter.grad = None
