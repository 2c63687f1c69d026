"""Rotary positions: the table of one batch, and its application to query and key heads.

Source: RoFormer (arXiv 2104.09864), eq. 34, in the half-split layout: dimension i turns together with i + headdim / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, headdim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every token's angles, computed once a batch and shared by all layers.

    Args:
        positions: (T,) integers, 0 at the first token of each document.
        headdim: even.
        theta: base of the geometric series of wavelengths.

    Returns:
        (cos, sin), each (T, 1, headdim / 2) fp32: the 1 broadcasts over heads.
    """
    # fp32 whatever the model computes in: bf16 cannot tell position 257 from 258.
    exponents = torch.arange(0, headdim, 2, dtype=torch.float32, device=positions.device) / headdim
    angles = positions.float()[:, None, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head's pairs of dimensions by the token's angles; (T, H, D) in and out, in the dtype of `heads`."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)
