"""fa2: FlashAttention-2 for PyTorch, dense and varlen. Depends on torch alone; knows tensors, nothing of models.

Reading order: `reference.py` (what is computed), `interface.py` (the public functions), `ops.py`, `csrc/params.h`.
"""

from __future__ import annotations

import torch

from fa2 import extension, reference
from fa2.extension import kernels
from fa2.interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from fa2.padding import (
    cu_seqlens_from_document_ids,
    cu_seqlens_from_eos,
    index_first_axis,
    pad_input,
    unpad_input,
)

__all__ = [
    "cu_seqlens_from_document_ids",
    "cu_seqlens_from_eos",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "index_first_axis",
    "is_available",
    "kernels",
    "pad_input",
    "reference",
    "unpad_input",
    "why_unavailable",
]


def why_unavailable(device: torch.device | str, dtype: torch.dtype, headdim: int) -> str | None:
    """A sentence when the CUDA attention kernels cannot serve these inputs, None when they can."""
    return extension.why_unavailable(str(device), dtype, headdim)


def is_available(device: torch.device | str, dtype: torch.dtype, headdim: int) -> bool:
    """Whether the CUDA attention kernels can serve inputs of this device, dtype and headdim."""
    return why_unavailable(device, dtype, headdim) is None
