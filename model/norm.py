"""LayerNorm and RMSNorm that come out as the next product reads them.

Knows tensors only; `gpt.py` builds its blocks of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.config import GPTConfig, Norm


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product with `x` runs in: the autocast dtype under autocast, otherwise x's own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dimension in its weight's dtype, whatever x is."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps).to(compute_dtype(x))


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in its weight's dtype, whatever x is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(compute_dtype(x))


def norm_of(config: GPTConfig) -> nn.Module:
    """A new norm of the model's kind."""
    if config.norm is Norm.rmsnorm:
        return RMSNorm(config.d_model, eps=config.norm_eps)
    return LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """F.layer_norm in the weight's dtype, in the form that suits who runs it.

    A compiler turns torch's variance into Welford's running one, a division for each element: a third to two thirds
    more time than the row takes to be read and written.

    Args:
        x: (..., d), any dtype.
        weight: (d,), and bias (d,) or None: the dtype of the result.
    """
    if not torch.compiler.is_compiling():
        return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


class _LayerNorm(torch.autograd.Function):
    """Mean and variance from two sums, over the distances to the row's first element.

    var = mean(d²) - mean(d)² loses digits where d is mostly mean: by a factor of at most the row's length, because the
    first element's own distance is part of the variance. Without it nothing would bound the factor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide = x.to(weight.dtype)
        first = wide[..., :1]
        distance = wide - first
        mean_distance = distance.mean(-1, keepdim=True)
        variance = (distance.square().mean(-1, keepdim=True) - mean_distance.square()).clamp(min=0)
        rstd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, bias, first + mean_distance, rstd)
        out = (distance - mean_distance) * rstd * weight
        return out if bias is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needed = [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dout, x.to(weight.dtype), weight.shape, mean, rstd, weight, bias, needed
        )
        return None if dx is None else dx.to(x.dtype), dweight, dbias, None
