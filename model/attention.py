"""Which attention the model runs: a name becomes a callable over unpadded tokens, causal inside each document.

Knows fa2 and torch. Every backend that comes out of here gives 0 at and past `cu_seqlens[-1]`, in the output and in
the gradients, whatever the inputs hold there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import fa2

AttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""(q (T, Hq, D), k (T, Hkv, D), v (T, Hkv, D), cu_seqlens (max_docs + 1,) int32, max_seqlen) -> out (T, Hq, D)."""


def fa2_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """fa2's kernels on CUDA tensors, its fast exact path on CPU tensors."""
    return fa2.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """fa2's exact PyTorch attention, any device and dtype; on a CPU the same call as `fa2_attention`, and as fast."""
    exact = fa2.reference.flash_attn_varlen_func if q.is_cuda else fa2.flash_attn_varlen_func
    return exact(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)


class _ZeroGradWherePadded(torch.autograd.Function):
    """The tensors themselves; their gradients are 0 in the rows that `real` (T,) leaves out."""

    @staticmethod
    def forward(ctx: Any, real: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(real)
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (real,) = ctx.saved_tensors
        dq, dk, dv = (torch.where(real[:, None, None], grad, 0.0) for grad in grads)
        return None, dq, dk, dv


def torch_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """torch's FlashAttention over documents; CUDA, bf16 or fp16.

    It reads no row past `cu_seqlens[-1]` and writes none, neither in the output nor in the gradients: both come from
    uninitialised memory there, so both are selected away. (Zeroing the inputs would cost three more copies.)
    """
    real = torch.arange(q.shape[0], device=q.device) < cu_seqlens[-1]
    q, k, v = _ZeroGradWherePadded.apply(real, q, k, v)
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **_VARLEN_OPTIONS)
    return torch.where(real[:, None, None], cast(Tensor, out), 0)


def resolve_attention(
    name: str, device: torch.device, dtype: torch.dtype, headdim: int, say: Callable[[str], object] = print
) -> tuple[str, AttentionFn]:
    """The backend of that name, checked against the device, the compute dtype and the head dimension.

    Args:
        name: auto, fa2, torch or reference. `auto` takes the first of fa2, torch, reference that can serve.
        device: where the model will run.
        dtype: what q, k and v will be: the autocast dtype under autocast.
        headdim: of the model.
        say: told in one line what `auto` took and why.

    Returns:
        (resolved name, backend).

    Raises:
        ValueError: an unknown name, or a named backend that cannot serve; the sentence says what to do.
    """
    device = torch.device(device)
    if name not in NAMES:
        raise ValueError(f"attention must be one of {', '.join(NAMES)}, got {name!r}")
    # asked only where the answer matters: on CUDA fa2 may look for a compiler to find it out
    lacks: dict[str, str | None] = {"reference": None}
    if name in ("auto", "fa2"):
        lacks["fa2"] = fa2.why_unavailable(device, dtype, headdim)
    if name in ("auto", "torch"):
        lacks["torch"] = why_torch_unavailable(device, dtype, headdim)
    if name == "auto":
        name = next(candidate for candidate in BACKENDS if lacks[candidate] is None)
        passed_over = [f"{k}: {v}" for k, v in sorted(lacks.items()) if v is not None]
        say(f"attention: auto takes {name}" + (f" ({'; '.join(passed_over)})" if passed_over else ""))
    elif lacks[name] is not None:
        raise ValueError(
            f"attention={name} cannot run here: {lacks[name]}; set attention=auto for the best that can, "
            "or attention=reference for the exact one that always can"
        )
    return name, BACKENDS[name]


def why_torch_unavailable(device: torch.device, dtype: torch.dtype, headdim: int) -> str | None:
    """A reason why torch's varlen attention cannot serve this, or None."""
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0, got {torch.cuda.get_device_capability(device)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {dtype}"
    if headdim % 8 or headdim > 256:
        return f"needs a headdim that is a multiple of 8, at most 256, got {headdim}"
    return None


def _varlen_options() -> dict[str, Any]:
    """Causal, as this torch spells it: `window_size` since 2.11, and grouped heads declared since 2.12."""
    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    return options


_VARLEN_OPTIONS = _varlen_options()

# in the order in which `auto` prefers them
BACKENDS: dict[str, AttentionFn] = {
    "fa2": fa2_attention,
    "torch": torch_attention,
    "reference": reference_attention,
}
NAMES = ("auto", *BACKENDS)
