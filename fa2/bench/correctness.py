"""Random attention problems against float64: `python -m fa2.bench.correctness --draws 2000 --out FILE`. Its parts are
the tests' too: `Problem`, `exact` (autograd through the whole score matrix, nothing shared with fa2), `ratios`,
`poison`.

The rule, as the field has it: the largest error is at most 2x (gradients 3x) that of plain PyTorch in the same 16-bit
dtype, plus a grain; the RMS error is bounded by itself, so that a bad baseline hides nothing; lse is within 1e-3.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fa2
from fa2.bench import machine

NAMES = ("out", "lse", "dq", "dk", "dv")
HEADDIMS = (8, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
# RMS error over the RMS of the result, 1.4 times the worst of 4938 random problems on an H200 (2026-11-29).
RMS = {
    torch.bfloat16: {"out": 4e-3, "dq": 7e-3, "dk": 7e-3, "dv": 5e-3},
    torch.float16: {"out": 5e-4, "dq": 1e-3, "dk": 1e-3, "dv": 8e-4},
}
# Which kernels: those that this GPU takes by itself; the sm80 family with the tiles of a GPU that grants a thread
# block as much shared memory as this one, as sm_80, as sm_86, sm_89 and sm_120.
TILES: dict[str, dict[str, str]] = {
    "newest": {},
    "large": {"FA2_ARCH": "sm80"},
    "middle": {"FA2_ARCH": "sm80", "FA2_MAX_SHARED_BYTES": "166912"},
    "small": {"FA2_ARCH": "sm80", "FA2_MAX_SHARED_BYTES": "101376"},
}


@dataclass
class Problem:
    """Inputs and a mask. Varlen has (T, nheads, headdim) tensors and the lengths, dense (batch, seqlen, nheads, …)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    q_lengths: list[int] | None = None
    k_lengths: list[int] | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None

    def __str__(self) -> str:
        shape = f"dense {tuple(self.q.shape)} k {self.k.shape[1]}"
        if self.q_lengths is not None:
            shape = f"varlen q {self.q_lengths} of {len(self.q)}, k {self.k_lengths} of {len(self.k)}"
        heads = f"{self.q.shape[-2]}/{self.k.shape[-2]}"
        mask = f"causal {self.causal} window {self.window}"
        return f"{self.q.dtype} headdim {self.q.shape[-1]} heads {heads} {mask} {shape}"


def cu_seqlens(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def run(p: Problem, deterministic: bool = False, max_seqlen: int | None = None) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv through the public function and autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (p.q, p.k, p.v))
    options: dict[str, Any] = {"softmax_scale": p.scale, "causal": p.causal, "window_size": p.window}
    options |= {"deterministic": deterministic, "return_attn_probs": True}
    if p.q_lengths is None or p.k_lengths is None:
        out, lse, _ = fa2.flash_attn_func(q, k, v, **options)
    else:
        cu_q = cu_seqlens(p.q_lengths, q.device)
        cu_k = cu_q if p.k_lengths is p.q_lengths else cu_seqlens(p.k_lengths, q.device)
        longest = [max_seqlen or max(x, default=0) for x in (p.q_lengths, p.k_lengths)]
        out, lse, _ = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest[0], longest[1], **options)
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), p.dout)


def _flat(p: Problem) -> tuple[list[Tensor], list[int], list[int]]:
    """q, k, v, dout as (T, nheads, headdim), zero past the last sequence, and the lengths."""
    if p.q_lengths is not None and p.k_lengths is not None:
        x = [t.detach().clone() for t in (p.q, p.k, p.v, p.dout)]
        for t, lengths in zip(x, (p.q_lengths, p.k_lengths, p.k_lengths, p.q_lengths), strict=True):
            t[sum(lengths) :] = 0
        return x, p.q_lengths, p.k_lengths
    b = p.q.shape[0]
    return [t.detach().flatten(0, 1) for t in (p.q, p.k, p.v, p.dout)], [p.q.shape[1]] * b, [p.k.shape[1]] * b


def _places(lengths: Sequence[int], total: int, tail: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each token its sequence (`tail` past the last one), its place in it, and that sequence's length."""
    each = torch.tensor([*lengths, total - sum(lengths)], device=device)
    sequence = torch.arange(len(each), device=device).repeat_interleave(each)
    start = each.cumsum(0) - each
    place = torch.arange(total, device=device) - start[sequence]
    return torch.where(sequence == len(lengths), tail, sequence), place, each[sequence]


def exact(p: Problem, dtype: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """out, lse, dq, dk, dv of plain PyTorch in `dtype`, flat, and the grain of dq and dk.

    The grain: delta = rowsum(dout * out) is computed from an out that is rounded to 16 bits (in FlashAttention too), so
    each row's dS is off by up to P times eps/2 * ||dout * out||; this is what that does to dq and dk.
    """
    (q, k, v, dout), q_lengths, k_lengths = _flat(p)
    eps = torch.finfo(q.dtype).eps
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    dout = dout.to(dtype)
    H, group = q.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if p.scale is None else p.scale
    q_doc, q_at, q_len = _places(q_lengths, q.shape[0], -1, q.device)
    k_doc, k_at, _ = _places(k_lengths, k.shape[0], -2, q.device)
    n_keys = torch.tensor([*k_lengths, 0], device=q.device)[q_doc]
    distance = k_at[None, :] - (q_at + n_keys - q_len)[:, None]
    hidden = q_doc[:, None] != k_doc[None, :]
    # As flash_attn: a bound of the longest sequence's keys or more is none.
    left, right = (-1 if bound >= max(k_lengths, default=0) else bound for bound in p.window)
    right = 0 if p.causal else right
    if left >= 0:
        hidden = hidden | (distance < -left)
    if right >= 0:
        hidden = hidden | (distance > right)
    empty = hidden.all(dim=1)
    k_all, v_all = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q * scale, k_all)
    scores = scores.masked_fill(hidden & ~empty[:, None], -math.inf)
    probs = scores.softmax(dim=-1).masked_fill(hidden, 0.0)
    lse = scores.logsumexp(dim=-1) if k.shape[0] else scores.new_zeros(H, q.shape[0])
    lse = lse.masked_fill(empty, -math.inf)
    out = torch.einsum("hmn,nhd->mhd", probs, v_all)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        delta_error = (eps / 2 * (dout * out).norm(dim=-1)).T  # (H, M)
        grain_q = scale * torch.einsum("hmn,nhd->mhd", probs * delta_error[..., None], k_all).abs()
        moved = (probs * delta_error[..., None]).square()
        grain_k = torch.einsum("hmn,mhd->nhd", moved, q.square())
        grain_k = scale * grain_k.unflatten(1, (k.shape[1], group)).sum(2).sqrt()
    return [out.detach(), lse.detach(), *grads], (grain_q, grain_k)


def _flat_lse(p: Problem, lse: Tensor) -> Tensor:
    return lse if p.q_lengths is not None else lse.transpose(0, 1).flatten(1)


def ratios(p: Problem, got: Sequence[Tensor]) -> dict[str, float]:
    """Error over its bound, at most 1 where it passes; inf for a NaN, or a -inf that is not where it must be."""
    want, grains = exact(p, torch.float64)
    baseline, _ = exact(p, p.q.dtype)
    grain_of = {"dq": grains[0], "dk": grains[1]}
    eps = torch.finfo(p.q.dtype).eps
    result = {}
    for name, x, w, b in zip(NAMES, got, want, baseline, strict=True):
        x = _flat_lse(p, x).double() if name == "lse" else x.double().reshape(w.shape)
        if name == "lse":
            finite = w.isfinite()
            same = torch.equal(x == -math.inf, ~finite)
            error = (x - w)[finite].abs()
            result[name] = float(error.max()) / 1e-3 if same and error.numel() else 0.0 if same else math.inf
            result[name] = result[name] if math.isfinite(result[name]) else math.inf
            continue
        if x.numel() == 0:
            result[name] = 0.0
            continue
        error = (x - w).abs()
        grain = grain_of.get(name, error.new_zeros(1))
        factor = 2 if name == "out" else 3
        # eps / 4: half a unit in the last place of a number of size 1/2; covers what is exactly 0 in the baseline.
        by_baseline = factor * (b.double() - w).abs().max() + eps / 4 + 3 * grain.max()
        by_rms = RMS[p.q.dtype][name] * w.square().mean().sqrt() + eps / 64 + 3 * grain.square().mean().sqrt()
        worst = torch.maximum(error.max() / by_baseline, error.square().mean().sqrt() / by_rms)
        result[name] = float(worst) if bool(torch.isfinite(worst)) else math.inf
    return result


def poison(device: torch.device | str) -> None:
    """Leave bytes of ones (NaN in every float type, -1 in the integers) in the memory that is handed out next."""
    blocks = []
    for count, size in ((24, 1 << 11), (12, 1 << 14), (8, 1 << 17), (4, 1 << 20), (4, 1 << 23), (3, 1 << 26)):
        blocks += [torch.empty(size, dtype=torch.uint8, device=device).fill_(255) for _ in range(count)]


@contextmanager
def tiles(size: str) -> Iterator[None]:
    """Calls take the kernels of this entry of TILES."""
    names = ("FA2_ARCH", "FA2_MAX_SHARED_BYTES")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(TILES[size])
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def draw(rng: random.Random, device: torch.device | str, tokens: int = 1600) -> Problem:
    """A random problem of at most about `tokens` tokens: shape, lengths, mask, dtype, grouping, scale and layout."""
    dtype = rng.choice([torch.bfloat16, torch.float16])
    headdim = rng.choice(HEADDIMS)
    nheads_kv = rng.choice([1, 1, 2, 3])
    nheads_q = nheads_kv * rng.choice([1, 1, 2, 3, 5])
    n = rng.choice([1, 1, 2, 5, 9])
    cap = tokens // n

    def length() -> int:
        edges = [x for x in (0, 1, 31, 32, 33, 63, 64, 65, 113, 127, 128, 129, 203, 255, 257) if x <= cap]
        return rng.choice([rng.choice(edges), rng.randint(0, min(cap, 16)), rng.randint(0, cap)])

    mask = rng.choice(["full", "causal", "window", "causal window"])
    window = (-1, -1)
    if mask == "window":
        window = (rng.choice([-1, 0, 1, rng.randint(0, cap)]), rng.choice([-1, 0, 1, rng.randint(0, cap)]))
    if mask == "causal window":
        window = (rng.randint(0, cap), -1)
    same, packed, varlen = rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.7
    generator = torch.Generator(device=device).manual_seed(rng.randrange(1 << 30))
    gain = rng.choice([1.0, 1.0, 3.0])

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn(*shape, generator=generator, device=device)).to(dtype)

    q_lengths = k_lengths = None
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    if varlen:
        q_lengths = [length() for _ in range(n)]
        k_lengths = q_lengths if same else [length() for _ in range(n)]
        tails = [rng.choice([0, 0, 1, 70, 200]) for _ in range(2)]
        q_shape, k_shape = (sum(q_lengths) + tails[0],), (sum(k_lengths) + tails[1],)
    else:
        seqlen_q = length()
        q_shape, k_shape = (n, seqlen_q), (n, seqlen_q if same else length())
    q, dout = normal(*q_shape, nheads_q, headdim, gain=gain), normal(*q_shape, nheads_q, headdim)
    if packed:
        k, v = normal(*k_shape, 2, nheads_kv, headdim).unbind(-3)
    else:
        k, v = (normal(*k_shape, nheads_kv, headdim) for _ in range(2))
    if q_lengths is not None and k_lengths is not None:
        for x in (q, dout):
            x[sum(q_lengths) :] = math.nan
        for x in (k, v):
            x[sum(k_lengths) :] = math.nan
    scale = rng.choice([None, None, 0.03, 1.0 / headdim])
    return Problem(q, k, v, dout, q_lengths, k_lengths, mask.startswith("causal"), window, scale)


def differential(
    draws: int, seed: int, device: str, seconds: float = math.inf, sizes: Sequence[str] = tuple(TILES)
) -> dict[str, Any]:
    """Run `draws` random problems, the `sizes` of TILES in turn; the worst ratios, and every failure in words."""
    rng = random.Random(seed)
    worst = dict.fromkeys(NAMES, 0.0)
    worst_at: dict[str, str] = {}
    failures: list[str] = []
    started, done = time.monotonic(), 0
    while done < draws and time.monotonic() - started < seconds:
        p = draw(rng, device)
        size, deterministic = sizes[done % len(sizes)], rng.random() < 0.3
        text = f"draw {done}: {size} kernels, deterministic {deterministic}, {p}"
        with tiles(size):
            poison(device)
            found = ratios(p, run(p, deterministic))
        done += 1
        for name, ratio in found.items():
            if ratio > worst[name] or name not in worst_at:
                worst[name], worst_at[name] = ratio, text
        if not max(found.values()) <= 1:
            failures.append(f"{text}: {', '.join(f'{n} {r:.2f}' for n, r in found.items())}")
    return {
        "draws": done,
        "kernels": list(sizes),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "worst_over_bound": {name: round(ratio, 3) for name, ratio in worst.items()},
        "worst_at": worst_at,
        "failures": failures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fa2.bench.correctness", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--draws", type=int, default=2000, help="how many problems (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", default=",".join(TILES), help="which, in turn (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--device", default="cuda", help="cpu checks the CPU kernels (default %(default)s)")
    parser.add_argument("--out", type=Path, help="write the record here, JSON")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("fa2: --device must be cpu where torch sees no CUDA device, got cuda", file=sys.stderr)
        return 2
    sizes = args.kernels.split(",")
    if unknown := [size for size in sizes if size not in TILES]:
        print(f"fa2: --kernels must be of {', '.join(TILES)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    record = {
        "machine": machine.describe(args.device),
        **differential(args.draws, args.seed, args.device, args.seconds, sizes),
    }
    for failure in record["failures"][:20]:
        print(f"FAILED {failure}")
    ratios_text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in record["worst_over_bound"].items())
    print(
        f"{record['draws']} draws in {record['seconds']} s, {len(record['failures'])} failures; "
        f"error/bound {ratios_text}"
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if record["failures"] or record["draws"] < args.draws else 0


if __name__ == "__main__":
    sys.exit(main())
