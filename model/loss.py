"""Cross-entropy of a linear read-out, without the whole logits tensor.

Knows tensors only. Logits of `chunk_tokens` rows exist at a time, in the backward pass too: the forward loop already
computes the gradients, because the loss is a sum and its only upstream gradient is one scalar. That is three matrix
products (logits, dhidden, dweight); recomputing the logits in the backward pass would be four. The price is that
dhidden (T, d) and dweight (V, d) live from the forward to the backward pass, which follows at once: no layer's
activations are freed in between, and both are needed there anyway.

Between the products, a chunk's logits become their gradient in one of two functions of the same meaning:
`softmax_in_place` runs operation by operation, `softmax_out_of_place` is written for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.linear import add_product

IGNORE = -100

Softmax = Callable[[Tensor, Tensor, int, torch.dtype], tuple[Tensor, Tensor]]
"""(logits (n, V), targets (n,), vocab_size, dtype) -> (() sum of nats over the valid rows, dlogits (n, V) in dtype)."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int = 4096,
    vocab_size: int | None = None,
    softmax: Softmax | None = None,
    logits_fp32: bool = True,
) -> Tensor:
    """Sum over the valid targets of −log softmax(hidden @ weight.T)[target], in nats.

    Under autocast the matrix products run in the autocast dtype; softmax, sum and the accumulation of the weight's
    gradient are fp32 (float64 for float64 inputs). Rows with an ignored target contribute nothing to the loss or to
    any gradient, also where `hidden` is NaN there. No double backward.

    Args:
        hidden: (T, d).
        weight: (V, d); rows at or past `vocab_size` are padding and take no part in the softmax.
        targets: (T,) int64 below `vocab_size`; -100 is ignored.
        chunk_tokens: at most this many rows' logits exist at once; the chunks are equal, but for the last.
        vocab_size: None takes all V rows.
        softmax: turns a chunk's logits into their gradient; None takes `softmax_in_place`.
        logits_fp32: under autocast keep the logits as they are accumulated; False rounds them to the autocast dtype,
            as torch's own cross-entropy behind a linear layer does.

    Returns:
        () fp32; float64 when hidden is.
    """
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    # asked here: inside a Function's forward, needs_input_grad is true for parameters even under no_grad
    needed = tuple(torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight))
    softmax = softmax_in_place if softmax is None else softmax
    # Equal chunks: a compiled softmax has one shape to be compiled for, and no product is thin.
    n_chunks = max(1, -(-hidden.shape[0] // chunk_tokens))
    chunk_tokens = max(1, -(-hidden.shape[0] // n_chunks))
    return _LinearCrossEntropy.apply(hidden, weight, targets, chunk_tokens, vocab_size, needed, softmax, logits_fp32)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        vocab_size: int,
        needed: tuple[bool, bool],
        softmax: Softmax,
        logits_fp32: bool,
    ) -> Tensor:
        device_type = hidden.device.type
        compute = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
        exact = torch.promote_types(hidden.dtype, torch.float32)
        need_dhidden, need_dweight = needed
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        dhidden = torch.empty_like(hidden) if need_dhidden else None
        dweight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if need_dweight else None

        with torch.autocast(device_type, enabled=False):
            readout = weight.to(compute)
            for start in range(0, hidden.shape[0], chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                valid = targets[rows] != IGNORE
                # select, not multiply: a NaN times 0 would reach the weight's gradient
                chunk = torch.where(valid[:, None], hidden[rows], 0).to(compute)
                logits = _matmul(chunk, readout.t(), exact if logits_fp32 else compute)
                nats, dlogits = softmax(logits, targets[rows], vocab_size, compute)
                loss += nats
                if dhidden is not None:
                    dhidden[rows] = dlogits @ readout
                if dweight is not None:
                    add_product(dweight, dlogits.t(), chunk)
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        # Scaled only here: the divisor (targets of the global batch) would push bf16 dlogits towards zero.
        return (
            None if dhidden is None else (dhidden * grad).to(dhidden.dtype),
            None if dweight is None else (dweight * grad).to(ctx.weight_dtype),
            *(None,) * 6,
        )


def softmax_in_place(logits: Tensor, targets: Tensor, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sum of −log p(target) over the valid rows, and its gradient, which overwrites the logits' memory."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits[:, vocab_size:] = -torch.inf
    valid = (targets != IGNORE)[:, None]
    target_column = torch.where(valid, targets[:, None], 0)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    nats = torch.where(valid, lse - logits.gather(1, target_column), 0).sum()
    dlogits = logits.sub_(lse).exp_()
    dlogits.scatter_(1, target_column, dlogits.gather(1, target_column) - 1)
    return nats, dlogits.mul_(valid).to(dtype)


def softmax_out_of_place(logits: Tensor, targets: Tensor, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `softmax_in_place`, written for a compiler: it reads the logits twice and writes dlogits once.

    No scatter and no write to the logits, each of which would be a kernel of its own over the whole chunk. Maximum and
    sum in two stages, of 32 columns and of a row: an element is read once for both, and no sum is rescaled while it
    runs, which costs a compiled single stage a tenth of its time.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    column = torch.arange(wide.shape[1], dtype=torch.int32, device=wide.device)
    wide = torch.where(column < vocab_size, wide, -torch.inf)
    valid = (targets != IGNORE)[:, None]
    target_column = torch.where(valid, targets[:, None], 0)
    parts = wide.unflatten(1, (-1, 32 if wide.shape[1] % 32 == 0 else wide.shape[1]))
    highest_of_part = parts.amax(dim=-1)
    # finite, so that a part of padding alone sums up to 0
    finite = highest_of_part.clamp(min=torch.finfo(wide.dtype).min)
    sum_of_part = (parts - finite[..., None]).exp().sum(dim=-1)
    highest = highest_of_part.amax(dim=-1, keepdim=True)
    lse = highest + (sum_of_part * (finite - highest).exp()).sum(dim=-1, keepdim=True).log()
    nats = torch.where(valid, lse - wide.gather(1, target_column), 0).sum()
    probability = (wide - lse).exp()
    dlogits = torch.where(column == target_column.to(torch.int32), probability - 1, probability)
    return nats, torch.where(valid, dlogits, 0).to(dtype)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; on CUDA the accumulator of a 16-bit product comes out unrounded."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)
