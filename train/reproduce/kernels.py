"""What a kernel's name, and the range it was launched in, say about it: tables of patterns, first match wins.

Knows no torch. The names are those of cuBLAS (nvjet, xmma, cutlass), ATen, Inductor's Triton, cuDNN, torch's
FlashAttention and fa2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum


class Class(Enum):
    """What a step's time goes to; the text is what tables call it."""

    gemm = "GEMM"
    attention = "attention"
    elementwise = "elementwise"
    accumulation = "gradient accumulation"
    loss_gemm = "loss, its GEMM"
    loss = "loss, the rest"
    clipping = "clipping"
    optimiser = "optimiser"
    data = "data and its copy"
    logging = "logging"
    unknown = "unknown kernels"
    gaps = "gaps between kernels"


# A kernel that was launched while the host was in one of these belongs there, whatever it is called. The names are
# those that torch's profiler gives operators, autograd functions and optimisers by itself, and ranges of this project.
RANGES: tuple[tuple[str, Class], ...] = (
    (r"gpt::eager_attention", Class.attention),
    (r"(?i)cross_?entropy", Class.loss),
    (r"AccumulateGrad|^aten::_foreach_zero_$", Class.accumulation),
    (r"^Optimizer\.(step|zero_grad)", Class.optimiser),
    (r"^aten::_foreach_copy_$", Class.optimiser),  # weights cast after they have moved
    (r"^aten::_foreach_norm$|^aten::linalg_vector_norm$", Class.clipping),
)

# What the name alone says.
KERNELS: tuple[tuple[str, Class], ...] = (
    (r"\bfa2::", Class.attention),
    (r"pytorch_flash|flash_(fwd|bwd)|\bflash::", Class.attention),
    (r"cudnn", Class.attention),  # a GPT calls cuDNN for attention alone
    (r"(?i)fmha|_efficient_attention|flex_attention", Class.attention),
    (r"(?i)cross_?entropy", Class.loss),
    (r"nvjet|cublas|splitK|gemm|gemv|xmma|cutlass|triton_(tem|mm|bmm|addmm)", Class.gemm),
    (r"(?i)adam", Class.optimiser),
    (r"(?i)lp_?norm", Class.clipping),
    (r"Memcpy HtoD", Class.data),
    (r"Memcpy DtoH", Class.logging),
    (r"Memcpy|Memset", Class.elementwise),
    (r"triton_", Class.elementwise),
    (
        r"at::native|at_cuda_detail|\b(cuda_)?cub::|multi_tensor_apply|(?i:softmax|(layer|rms)_?norm|elementwise|gelu|rotary)",
        Class.elementwise,
    ),
)

_RANGES = tuple((re.compile(pattern), kind) for pattern, kind in RANGES)
_KERNELS = tuple((re.compile(pattern), kind) for pattern, kind in KERNELS)


def class_of_range(name: str) -> Class | None:
    """What the kernels launched in a range of this name belong to; None for a range that says nothing."""
    return next((kind for pattern, kind in _RANGES if pattern.search(name)), None)


def class_of_kernel(name: str) -> Class:
    """What a kernel of this name is, wherever it was launched."""
    return next((kind for pattern, kind in _KERNELS if pattern.search(name)), Class.unknown)


# Attention: what a forward and backward pass must have run, and must not; on a CPU the operators tell.
_FLASH, _CUDNN, _FA2 = r"pytorch_flash|\bflash_(fwd|bwd)_", r"cudnn", r"\bfa2::"
EXPECTED: dict[str, tuple[str, str]] = {
    "eager": (r"(?i)softmax", rf"{_FLASH}|{_CUDNN}|{_FA2}|fmha"),
    "sdpa_flash": (_FLASH, rf"{_CUDNN}|{_FA2}|fmha"),
    "sdpa_cudnn": (_CUDNN, rf"pytorch_flash|{_FA2}|fmha"),  # cuDNN's own names speak of flash too
    "torch": (_FLASH, rf"{_CUDNN}|{_FA2}|fmha"),
    "fa2": (r"\bfa2::.*attention_(fwd|bwd)", rf"{_FLASH}|{_CUDNN}|fmha"),
}
EXPECTED_ON_CPU: dict[str, tuple[str, str]] = {
    "eager": (r"^gpt::eager_attention_backward$", r"flash_attention|^fa2::"),
    "sdpa_flash": (r"^aten::_scaled_dot_product_flash_attention_for_cpu_backward$", r"^gpt::eager|^fa2::"),
}


def check_attention(backend: str, ran: Iterable[str], on_gpu: bool) -> list[str]:
    """The kernels of attention among those that a forward and backward pass ran; on a CPU its operators.

    Raises:
        ValueError: the backend's own are not among them, or another backend's are.
    """
    names, expected = sorted(set(ran)), EXPECTED if on_gpu else EXPECTED_ON_CPU
    if backend not in expected:
        return []
    wanted, others = expected[backend]
    own = [name for name in names if re.search(wanted, name)]
    if not own:
        listed = ", ".join(name[:60] for name in names[:12]) or "none at all (is CUPTI there?)"
        raise ValueError(f"attention={backend} must run kernels named like {wanted!r}, the profiler saw {listed}")
    if wrong := [name for name in names if re.search(others, name)]:
        raise ValueError(
            f"attention={backend} must run no other backend's kernel, the profiler saw {', '.join(wrong)[:300]}"
        )
    return [name[:160] for name in own]
