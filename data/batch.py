"""`VarlenBatch`, the contract between data, train and model; `StepBatch`, the micro-batches of one optimiser step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class VarlenBatch:
    """One micro-batch on one rank: documents side by side, no padding between them.

    All shapes are fixed for a run. Padding tokens, if any, lie at or past `cu_seqlens[-1]` (packing `pad` instead
    makes a row's padding a document of its own, whose targets are all -100).
    """

    tokens: Tensor  # (T,) int64
    targets: Tensor  # (T,) int64, -100 where there is no next token of the same document, and on padding
    positions: Tensor  # (T,) int32, 0 at the first token of each document piece
    cu_seqlens: Tensor  # (max_docs + 1,) int32, [0, ..., T_real, T_real, ...]
    max_seqlen: int  # the run's context length, constant

    def to(self, device: torch.device | str, non_blocking: bool = False) -> VarlenBatch:
        moved = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "max_seqlen"}
        return replace(self, **{k: v.to(device, non_blocking=non_blocking) for k, v in moved.items()})

    def pin_memory(self) -> VarlenBatch:
        pinned = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "max_seqlen"}
        return replace(self, **{k: v.pin_memory() for k, v in pinned.items()})


@dataclass(frozen=True)
class StepBatch:
    """What one rank needs for one optimiser step. The counts are over all ranks, known from the plan, not reduced."""

    micro_batches: list[VarlenBatch]
    n_targets: int  # valid targets of the whole step, all ranks: the loss is divided by this
    n_tokens: int  # real tokens of the whole step, all ranks
    sum_len_sq: int  # Σ len² over the document pieces of the whole step, all ranks
    n_bytes: int = 0  # UTF-8 bytes of text that the targets stand for, all ranks; 0 where unknown

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        return replace(self, micro_batches=[b.to(device, non_blocking) for b in self.micro_batches])

    def pin_memory(self) -> StepBatch:
        return replace(self, micro_batches=[b.pin_memory() for b in self.micro_batches])
