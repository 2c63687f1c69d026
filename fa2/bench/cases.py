"""What is measured: the paper's sweep, packed documents, grouped queries. Each case knows its FLOPs and makes its
tensors.

FLOPs: forward 4 * nheads * headdim * Σ seqlen², halved for causal; backward 2.5 times that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEADDIMS = (64, 128, 256)
MASKS = ("causal", "full")


@dataclass(frozen=True)
class Case:
    suite: str  # paper, packed or gqa
    name: str
    lengths: tuple[int, ...]
    nheads_q: int
    nheads_kv: int
    headdim: int
    causal: bool

    @property
    def dense(self) -> bool:
        return self.suite != "packed"

    @property
    def forward_flops(self) -> float:
        whole = 4 * self.nheads_q * self.headdim * sum(n * n for n in self.lengths)
        return whole / 2 if self.causal else whole

    def flops(self, part: str) -> float:
        """Of forward, backward, or both."""
        return self.forward_flops * {"forward": 1.0, "backward": 2.5, "both": 3.5}[part]

    def tensors(self, device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """q, k, v, dout, random; (batch, seqlen, nheads, headdim) or, packed, (T, nheads, headdim) and cu_seqlens."""
        shape = (len(self.lengths), self.lengths[0]) if self.dense else (sum(self.lengths),)
        heads = {"q": self.nheads_q, "k": self.nheads_kv, "v": self.nheads_kv, "dout": self.nheads_q}
        x = {name: torch.randn(*shape, h, self.headdim, device=device, dtype=dtype) for name, h in heads.items()}
        if not self.dense:
            x["cu_seqlens"] = torch.tensor([0, *self.lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        return x


def paper(headdims: Sequence[int], masks: Sequence[str], seqlens: Sequence[int], tokens: int = 16384) -> list[Case]:
    """FlashAttention-2, section 4.1: 16k tokens, hidden size 2048."""
    return [
        Case("paper", f"{d} {mask} {s}", (s,) * (tokens // s), 2048 // d, 2048 // d, d, mask == "causal")
        for d in headdims
        for mask in masks
        for s in seqlens
        if s <= tokens
    ]


def packed(tokens: int = 32768) -> list[Case]:
    """Documents side by side, causal, 16 heads of 128: equal, log-normal, short, one long, one among many short."""
    rng = random.Random(0)
    log_normal: list[int] = []
    while sum(log_normal) < tokens:
        length = max(16, int(rng.lognormvariate(6.5, 1.0)))
        log_normal.append(min(length, tokens // 4, tokens - sum(log_normal)))
    short: list[int] = []
    while sum(short) < tokens:
        short.append(min(rng.randint(32, 252), tokens - sum(short)))
    short_side = [tokens // 512] * 128
    mixes = {
        f"16 of {tokens // 16}": [tokens // 16] * 16,
        f"{len(log_normal)}, log-normal": log_normal,
        f"{len(short)} of 32 to 252": short,
        f"1 of {tokens}": [tokens],
        f"1 of {tokens // 2} between 2 x 128 of {tokens // 512}": [*short_side, tokens // 2, *short_side],
    }
    return [Case("packed", name, tuple(lengths), 16, 16, 128, True) for name, lengths in mixes.items()]


def gqa(tokens: int = 8192) -> list[Case]:
    """64 query heads over 8 kv heads of 128, causal."""
    return [
        Case("gqa", f"64/8 causal {s}", (s,) * (tokens // s), 64, 8, 128, True) for s in (2048, 8192) if s <= tokens
    ]
