"""GELU in its tanh form, as GPT-2 and GPT-3 have it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """F.gelu(x, approximate="tanh"), in the form that suits who runs it.

    tanh(u) = 2 sigmoid(2u) - 1 turns it into x · sigmoid(2u): one exponential, where a compiled tanh has two branches
    and makes a pass over the widest tensor of a block as long in arithmetic as in memory.
    """
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = 2 * math.sqrt(2 / math.pi)
    two_u = wide * (scale + 0.044715 * scale * (wide * wide))
    return (wide * torch.sigmoid(two_u)).to(x.dtype)
