"""Which attention the model runs: a name becomes a callable over unpadded tokens, causal inside each document.

Knows fa2 and torch. Every backend that takes packed documents gives 0 at and past `cu_seqlens[-1]`, in the output and
in the gradients, whatever the inputs hold there. The dense ones, which fa2 is compared with, do not look at cu_seqlens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import fa2

_aten = torch.ops.aten
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


def _heads_first(x: Tensor, seqlen: int) -> Tensor:
    """(B * S, H, D) as (B, H, S, D), without a copy."""
    return x.unflatten(0, (-1, seqlen)).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B * S, H, D); no copy where the memory lies that way, as FlashAttention's does."""
    return x.transpose(1, 2).flatten(0, 1)


def sdpa_flash_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """SDPA's FlashAttention operator itself, past SDPA's choice of backend; every document is `max_seqlen` long.

    torch's on-disk compile cache does not see the `sdpa_kernel` context: under it, one backend's graph can run for
    another. An operator's name is part of the graph.
    """
    q, k, v = (_heads_first(x, max_seqlen) for x in (q, k, v))
    if q.is_cuda:
        return _tokens_first(_aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True, False)[0])
    return _tokens_first(_aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, True)[0])


def sdpa_cudnn_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """SDPA's cuDNN operator itself, CUDA; every document is `max_seqlen` long."""
    q, k, v = (_heads_first(x, max_seqlen) for x in (q, k, v))
    with_lse = True  # the backward pass reads it
    return _tokens_first(
        _aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, with_lse, 0.0, True, False)[0]
    )


def eager_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Two matrix products, a mask and a softmax, all scores in memory; every document is `max_seqlen` long.

    An operator of its own: a compiler that saw the parts would put a fused kernel in their place.
    """
    q, k, v = (_heads_first(x, max_seqlen) for x in (q, k, v))
    return _tokens_first(_eager(q, k, v)[0])


@torch.library.custom_op("gpt::eager_attention", mutates_args=())
def _eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out (B, H, S, D), probabilities (B, H, S, S)) of q, k, v (B, H, S, D), all of one dtype."""
    with torch.autocast(q.device.type, enabled=False):  # it would keep the probabilities in fp32, twice the memory
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        probabilities = scores.masked_fill_(later, -torch.inf).softmax(dim=-1)
        return probabilities @ v, probabilities


@_eager.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((*q.shape[:-1], k.shape[-2]))


@torch.library.custom_op("gpt::eager_attention_backward", mutates_args=())
def _eager_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, probabilities: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    with torch.autocast(q.device.type, enabled=False):
        dv = probabilities.transpose(-1, -2) @ dout
        dprobabilities = dout @ v.transpose(-1, -2)
        dscores = _aten._softmax_backward_data(dprobabilities, probabilities, -1, probabilities.dtype)
        return (dscores @ k) * scale, dscores.transpose(-1, -2) @ (q * scale), dv


@_eager_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # a zero gradient of the probabilities, as large as all the scores
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, dout: Tensor, dprobabilities: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return _eager_backward(dout, *ctx.saved_tensors)


_eager.register_autograd(_differentiate, setup_context=_keep_for_backward)


def resolve_attention(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    headdim: int,
    say: Callable[[str], object] = print,
    one_length: bool = False,
) -> tuple[str, AttentionFn]:
    """The backend of that name, checked against the device, the compute dtype and the head dimension.

    Args:
        name: auto, fa2, torch or reference; eager, sdpa_flash or sdpa_cudnn for documents of one length. `auto` takes
            the first of fa2, torch, reference that can serve.
        device: where the model will run.
        dtype: what q, k and v will be: the autocast dtype under autocast.
        headdim: of the model.
        say: told in one line what `auto` took and why.
        one_length: the caller's word that every document is `max_seqlen` long.

    Returns:
        (resolved name, backend).

    Raises:
        ValueError: an unknown name, or a named backend that cannot serve; the sentence says what to do.
    """
    device = torch.device(device)
    if name not in NAMES:
        raise ValueError(f"attention must be one of {', '.join(NAMES)}, got {name!r}")
    if name in DENSE_BACKENDS and not one_length:
        raise ValueError(
            f"attention={name} takes documents of one length only, as data=synthetic makes them with whole contexts in "
            "a micro-batch; attention=fa2 and attention=torch take packed documents"
        )
    # asked only where the answer matters: on CUDA fa2 may look for a compiler to find it out
    lacks: dict[str, str | None] = {"reference": None}
    if name in ("auto", "fa2"):
        lacks["fa2"] = fa2.why_unavailable(device, dtype, headdim)
    if name in ("auto", "torch"):
        lacks["torch"] = why_torch_unavailable(device, dtype, headdim)
    if name == "sdpa_cudnn" or (name == "sdpa_flash" and device.type == "cuda"):
        lacks[name] = why_torch_unavailable(device, dtype, headdim)
    if name == "auto":
        name = next(candidate for candidate in BACKENDS if lacks[candidate] is None)
        passed_over = [f"{k}: {v}" for k, v in sorted(lacks.items()) if v is not None]
        say(f"attention: auto takes {name}" + (f" ({'; '.join(passed_over)})" if passed_over else ""))
    elif lacks.get(name) is not None:
        raise ValueError(
            f"attention={name} cannot run here: {lacks[name]}; set attention=auto for the best that can, "
            "or attention=reference for the exact one that always can"
        )
    return name, (BACKENDS | DENSE_BACKENDS)[name]


def why_torch_unavailable(device: torch.device, dtype: torch.dtype, headdim: int) -> str | None:
    """A reason why torch's attention kernels cannot serve this, or None."""
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
# what fa2 is compared with: no document lengths, and rows of padding that are documents like any other
DENSE_BACKENDS: dict[str, AttentionFn] = {
    "eager": eager_attention,
    "sdpa_flash": sdpa_flash_attention,
    "sdpa_cudnn": sdpa_cudnn_attention,
}
NAMES = ("auto", *BACKENDS, *DENSE_BACKENDS)
