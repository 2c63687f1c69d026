"""Small problems for the emulated kernels, the same numbers for the same seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa2.bench.correctness import Problem


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(q_shape, k_shape, headdim, dtype=torch.bfloat16, heads=(2, 1), tails=(0, 0), **options) -> Problem:
    """Dense shapes are (batch, seqlen), varlen ones lists of lengths; `tails`: tokens past the last, that hold NaN."""
    if isinstance(q_shape, list):
        options |= {"q_lengths": q_shape, "k_lengths": k_shape}
        q_shape, k_shape = ((sum(n) + tail,) for n, tail in zip((q_shape, k_shape), tails, strict=True))
    q, dout = (normal(*q_shape, heads[0], headdim, dtype=dtype, seed=i) for i in (0, 3))
    k, v = (normal(*k_shape, heads[1], headdim, dtype=dtype, seed=i) for i in (1, 2))
    for x, tail in ((q, tails[0]), (dout, tails[0]), (k, tails[1]), (v, tails[1])):
        x[len(x) - tail :] = math.nan
    return Problem(q, k, v, dout, **options)
