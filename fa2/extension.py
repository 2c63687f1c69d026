"""Finds, builds once and loads the CUDA extension, and says which kernels it holds."""

from __future__ import annotations

import torch


@torch.compiler.assume_constant_result
def why_unavailable(device: str, dtype: torch.dtype, headdim: int) -> str | None:
    if torch.device(device).type != "cuda":
        return f"the CUDA attention kernels need a CUDA device, not {device!r}"
    return "no attention kernel exists yet"
