"""The CPU path of the public functions: PyTorch's blocked CPU flash kernel for each sequence whose mask it knows (none,
or plain causal with as many queries as keys), the reference for the others. Each sequence is computed alone, so its
bits do not depend on its neighbours. 16-bit inputs are computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa2 import reference

_aten = torch.ops.aten


def _flash_mask(M: int, N: int, left: int, right: int) -> bool | None:
    """The kernel's is_causal flag that means this mask, or None where neither does."""
    left_open = left < 0 or left >= N - 1
    if not left_open:
        return None
    if right < 0 or right >= M - 1:
        return False
    return True if right == 0 and M == N else None


def _heads_first(x_MHD: Tensor, nheads_q: int) -> Tensor:
    """(M, H, D) -> (1, Hq, M, D); a kv head is repeated for the query heads of its group.

    Contiguous, because the kernel's matmuls may round differently for differently aligned views.
    """
    M, H, D = x_MHD.shape
    x = x_MHD.transpose(0, 1)
    if nheads_q != H:
        x = x[:, None].expand(H, nheads_q // H, M, D).reshape(nheads_q, M, D)
    return x.contiguous()[None]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """`reference.attend`, faster."""
    causal = _flash_mask(len(q), len(k), left, right)
    if causal is None:
        return reference.attend(q, k, v, scale, left, right)
    Hq = q.shape[1]
    heads = (_heads_first(x, Hq) for x in (q, k, v))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal, scale=scale)
    return out[0].transpose(0, 1), lse[0]


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.attend_backward`, faster; dk and dv of a group's heads are summed in the dtype computed in."""
    causal = _flash_mask(len(q), len(k), left, right)
    if causal is None:
        return reference.attend_backward(dout, q, k, v, out, lse, scale, left, right)
    (N, Hkv, D), Hq = k.shape, q.shape[1]
    doutx, qx, kx, vx, outx = (_heads_first(x, Hq) for x in (dout, q, k, v, out))
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        doutx, qx, kx, vx, outx, lse.contiguous()[None], 0.0, causal, scale=scale
    )
    if Hq != Hkv:
        dk, dv = (x.reshape(1, Hkv, Hq // Hkv, N, D).sum(dim=2) for x in (dk, dv))
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
