"""Exact attention in plain PyTorch, forward and written-out backward: the oracle of the tests and the definition of
what every kernel must compute. Knows tensors only. Read next: `cpu.py` (the fast CPU path), `interface.py` (the public
calls).

Letters in names give the axes: M queries and N keys of one sequence, H heads, G query heads per kv head, D headdim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fa2 import checks

# Scores of one block of queries, in elements: 2^24 fp32 scores are 64 MB, whatever the sequence length.
_MAX_BLOCK_SCORES = 1 << 24

Attend = Callable[[Tensor, Tensor, Tensor, float, int, int], tuple[Tensor, Tensor]]
AttendBackward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, int], tuple[Tensor, Tensor, Tensor]
]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scores, sums and lse have: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def key_range(first_row: int, last_row: int, seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> tuple[int, int]:
    """Half-open range of the keys that any of the rows first_row..last_row sees; empty when stop <= start.

    Masks are aligned to the bottom right: row i stands at key position i + seqlen_k - seqlen_q.
    """
    left, right = window
    shift = seqlen_k - seqlen_q
    start = max(0, first_row + shift - left) if left >= 0 else 0
    stop = min(seqlen_k, last_row + shift + right + 1) if right >= 0 else seqlen_k
    return start, stop


def _visible(rows: range, keys: range, shift: int, window: tuple[int, int], device: torch.device) -> Tensor:
    """(rows, keys) bool: which key each row sees."""
    left, right = window
    at = torch.arange(rows.start, rows.stop, device=device)[:, None] + shift
    key = torch.arange(keys.start, keys.stop, device=device)[None, :]
    seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    return seen


def _grouped(x_MHD: Tensor, nheads_kv: int) -> Tensor:
    """(M, Hq, D) -> (Hkv, G, M, D), a view."""
    M, H, D = x_MHD.shape
    return x_MHD.view(M, nheads_kv, H // nheads_kv, D).permute(1, 2, 0, 3)


def _row_blocks(M: int, N: int, H: int, left: int, right: int) -> Iterator[range]:
    step = max(1, _MAX_BLOCK_SCORES // max(1, N * H))
    if left >= 0 and right >= 0:
        # A block sees `step + left + right` keys: blocks as tall as the band waste at most half of them.
        step = min(step, max(128, left + right + 1))
    return (range(i, min(i + step, M)) for i in range(0, M, step))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: q (M, Hq, D), k and v (N, Hkv, D), all of one dtype that is computed in.

    Returns out (M, Hq, D) and lse (Hq, M). A row that sees no key gives out 0 and lse -inf.
    """
    M, Hq, D = q.shape
    N, Hkv, _ = k.shape
    out = q.new_zeros(M, Hq, D)
    lse = q.new_full((Hq, M), -torch.inf)
    q_HGMD, out_HGMD, lse_HGM = _grouped(q, Hkv), _grouped(out, Hkv), lse.view(Hkv, Hq // Hkv, M)
    k_HND, v_HND = k.transpose(0, 1), v.transpose(0, 1)
    for rows in _row_blocks(M, N, Hq, left, right):
        start, stop = key_range(rows[0], rows[-1], M, N, (left, right))
        if stop <= start:
            continue
        block = slice(rows.start, rows.stop)
        qb = q_HGMD[:, :, block].reshape(Hkv, -1, D)
        scores = torch.matmul(qb, k_HND[:, start:stop].mT).mul_(scale).view(Hkv, -1, len(rows), stop - start)
        hidden = ~_visible(rows, range(start, stop), N - M, (left, right), q.device)
        scores.masked_fill_(hidden, -torch.inf)
        lse_block = torch.logsumexp(scores, dim=-1)
        # -inf - -inf would be NaN: an empty row subtracts 0 and gets probabilities 0.
        probs = scores.sub_(lse_block.masked_fill(lse_block == -torch.inf, 0.0)[..., None]).exp_()
        out_block = torch.matmul(probs.view(Hkv, -1, stop - start), v_HND[:, start:stop])
        empty = hidden.all(dim=-1)
        out_HGMD[:, :, block] = out_block.view(Hkv, -1, len(rows), D).masked_fill(empty[:, None], 0.0)
        lse_HGM[:, :, block] = lse_block
    return out, lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` for one sequence; dk and dv are summed over the query heads of their group.

    delta = rowsum(dout * out) is taken as rowsum(P * dP), which does not feel the rounding of a 16-bit `out`.
    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    M, Hq, D = q.shape
    N, Hkv, _ = k.shape
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q_HGMD, dq_HGMD, dout_HGMD = _grouped(q, Hkv), _grouped(dq, Hkv), _grouped(dout, Hkv)
    lse_HGM = lse.view(Hkv, Hq // Hkv, M)
    k_HND, v_HND = k.transpose(0, 1), v.transpose(0, 1)
    dk_HND, dv_HND = dk.transpose(0, 1), dv.transpose(0, 1)
    for rows in _row_blocks(M, N, Hq, left, right):
        start, stop = key_range(rows[0], rows[-1], M, N, (left, right))
        if stop <= start:
            continue
        block, keys = slice(rows.start, rows.stop), slice(start, stop)
        hidden = ~_visible(rows, range(start, stop), N - M, (left, right), q.device)
        empty = hidden.all(dim=-1)
        qb = q_HGMD[:, :, block].masked_fill(empty[:, None], 0.0).reshape(Hkv, -1, D)
        doutb = dout_HGMD[:, :, block].masked_fill(empty[:, None], 0.0).reshape(Hkv, -1, D)
        lse_block = lse_HGM[:, :, block].masked_fill(empty, 0.0)
        shape = (Hkv, -1, len(rows), stop - start)
        scores = torch.matmul(qb, k_HND[:, keys].mT).mul_(scale).view(shape).masked_fill_(hidden, -torch.inf)
        probs = scores.sub_(lse_block[..., None]).exp_()
        dprobs = torch.matmul(doutb, v_HND[:, keys].mT).view(shape).masked_fill_(hidden, 0.0)
        delta = (probs * dprobs).sum(dim=-1, keepdim=True)
        flat = (Hkv, -1, stop - start)
        dscores = dprobs.sub_(delta).mul_(probs).view(flat)
        dv_HND[:, keys] += torch.matmul(probs.view(flat).mT, doutb)
        dk_HND[:, keys] += torch.matmul(dscores.mT, qb).mul_(scale)
        dq_HGMD[:, :, block] = torch.matmul(dscores, k_HND[:, keys]).mul_(scale).view(Hkv, -1, len(rows), D)
    return dq, dk, dv


def _sequences(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows of q and of k that belong to each sequence with at least one query and one key."""
    at_q = checks.offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    at_k = checks.offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    for i in range(len(at_q) - 1):
        if at_q[i] < at_q[i + 1] and at_k[i] < at_k[i + 1]:
            yield slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])


def _exactly(q: Tensor) -> torch.autocast:
    """Inside an autocast region the matmuls here would be cast down again."""
    return torch.autocast(device_type=q.device.type, enabled=False)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    left: int,
    right: int,
    attend: Attend = attend,
) -> tuple[Tensor, Tensor]:
    """out (T_q, Hq, D) in q's dtype and lse (Hq, T_q); each sequence is attended alone, in fp32 or float64."""
    dtype = compute_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    with _exactly(q):
        for qs, ks in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
            out[qs], lse[:, qs] = attend(q[qs].to(dtype), k[ks].to(dtype), v[ks].to(dtype), scale, left, right)
    return out, lse


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    left: int,
    right: int,
    attend_backward: AttendBackward = attend_backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' dtype; zero on tokens that belong to no sequence."""
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with _exactly(q):
        for qs, ks in _sequences(q, k, cu_seqlens_q, cu_seqlens_k):
            g, q_i, out_i = (x[qs].to(dtype) for x in (dout, q, out))
            k_i, v_i = k[ks].to(dtype), v[ks].to(dtype)
            grads = attend_backward(g, q_i, k_i, v_i, out_i, lse[:, qs], scale, left, right)
            dq[qs], dk[ks], dv[ks] = grads
    return dq, dk, dv


def dense_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, attend: Attend = attend
) -> tuple[Tensor, Tensor]:
    """out (b, s, Hq, D) and lse (b, Hq, s): the batch as sequences side by side, so both layouts agree bit for bit."""
    dtype = compute_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    if q.shape[1] and k.shape[1]:
        with _exactly(q):
            for i in range(q.shape[0]):
                out[i], lse[i] = attend(q[i].to(dtype), k[i].to(dtype), v[i].to(dtype), scale, left, right)
    return out, lse


def dense_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    left: int,
    right: int,
    attend_backward: AttendBackward = attend_backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' shapes and dtype."""
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[1] and k.shape[1]:
        with _exactly(q):
            for i in range(q.shape[0]):
                g, q_i, k_i, v_i, out_i, lse_i = (x[i].to(dtype) for x in (dout, q, k, v, out, lse))
                dq[i], dk[i], dv[i] = attend_backward(g, q_i, k_i, v_i, out_i, lse_i, scale, left, right)
    return dq, dk, dv


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, left: int, right: int
    ) -> Any:
        out, lse = varlen_forward(q, k, v, cu_q, cu_k, scale, left, right)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.mask = (scale, left, right)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> Any:
        return *varlen_backward(dout, *ctx.saved_tensors, *ctx.mask), None, None, None, None, None


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> Any:
        out, lse = dense_forward(q, k, v, scale, left, right)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask = (scale, left, right)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> Any:
        return *dense_backward(dout, *ctx.saved_tensors, *ctx.mask), None, None, None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`fa2.flash_attn_func` computed exactly (fp32 inside, float64 for float64) on any device, slowly.

    Args, Returns and Raises: as `fa2.flash_attn_func`, but any floating dtype and any headdim.
    """
    checks.options(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    checks.dense(q, k, v)
    left, right = checks.window(window_size, causal, k.shape[1])
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    out, lse = _Dense.apply(q, k, v, scale, left, right)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`fa2.flash_attn_varlen_func` computed exactly (fp32 inside, float64 for float64) on any device, slowly.

    Reads cu_seqlens on the host, so on a GPU it synchronises. Memory stays linear in the sequence length.
    Args, Returns and Raises: as `fa2.flash_attn_varlen_func`, but any floating dtype and any headdim.
    """
    checks.options(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    left, right = checks.window(window_size, causal, max_seqlen_k)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    out, lse = _Varlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right)
    return (out, lse, None) if return_attn_probs else out
