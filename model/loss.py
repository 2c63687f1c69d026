"""Cross-entropy of a linear read-out, without the whole logits tensor.

Knows tensors only. Logits of `chunk_tokens` rows exist at a time, in the backward pass too: the forward loop already
computes the gradients, because the loss is a sum and its only upstream gradient is one scalar. That is three matrix
products (logits, dhidden, dweight); recomputing the logits in the backward pass would be four. The price is that
dhidden (T, d) and dweight (V, d) live from the forward to the backward pass, which follows at once: no layer's
activations are freed in between, and both are needed there anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int = 4096, vocab_size: int | None = None
) -> Tensor:
    """Sum over the valid targets of −log softmax(hidden @ weight.T)[target], in nats.

    Under autocast the matrix products run in the autocast dtype; softmax, sum and the accumulation of the weight's
    gradient are fp32 (float64 for float64 inputs). Rows with an ignored target contribute nothing to the loss or to
    any gradient, also where `hidden` is NaN there. No double backward.

    Args:
        hidden: (T, d).
        weight: (V, d); rows at or past `vocab_size` are padding and take no part in the softmax.
        targets: (T,) int64 below `vocab_size`; -100 is ignored.
        chunk_tokens: rows whose logits exist at once.
        vocab_size: None takes all V rows.

    Returns:
        () fp32; float64 when hidden is.
    """
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    # asked here: inside a Function's forward, needs_input_grad is true for parameters even under no_grad
    needed = tuple(torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight))
    return _LinearCrossEntropy.apply(hidden, weight, targets, chunk_tokens, vocab_size, needed)


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
                logits = _matmul(chunk, readout.t(), exact)
                nats, dlogits = _nats_and_dlogits(logits, targets[rows], valid, vocab_size)
                loss += nats
                if dhidden is None and dweight is None:
                    continue
                dlogits = dlogits.to(compute)
                if dhidden is not None:
                    dhidden[rows] = dlogits @ readout
                if dweight is not None:
                    _add_matmul(dweight, dlogits.t(), chunk)
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
            *(None,) * 4,
        )


def _nats_and_dlogits(logits: Tensor, targets: Tensor, valid: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Sum of −log p(target) over the valid rows, and its gradient, which overwrites the logits' memory."""
    logits[:, vocab_size:] = -torch.inf
    target_column = torch.where(valid, targets, 0)[:, None]
    lse = logits.logsumexp(dim=-1, keepdim=True)
    nats = torch.where(valid[:, None], lse - logits.gather(1, target_column), 0).sum()
    dlogits = logits.sub_(lse).exp_()
    dlogits.scatter_(1, target_column, dlogits.gather(1, target_column) - 1)
    return nats, dlogits.mul_(valid[:, None])


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; on CUDA the accumulator of a 16-bit product comes out unrounded."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _add_matmul(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in the dtype of `out`, without rounding the product to 16 bits first."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)
