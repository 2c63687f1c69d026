"""The CUDA kernels without a GPU: their sources run in the emulator of `emulation/`, against float64 by the rule of
`fa2/bench/correctness.py`, in several orders of events; and faults put into them are found.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fa2.bench.correctness import Problem, ratios

from . import emulation
from .emulation.problems import problem

pytestmark = [
    pytest.mark.skipif(emulation.why_not() is not None, reason=str(emulation.why_not())),
    pytest.mark.usefixtures("one_torch_thread"),
]
ORDERS = [("early", 0), ("late", 1), ("random", 2), ("random", 3)]

build = functools.cache(emulation.build)


def check(p: Problem, forward, backward=None, **options) -> tuple[Tensor, ...]:
    got = emulation.run(p, forward, backward, **options)
    gradients = () if backward else (torch.zeros_like(x) for x in (p.q, p.k, p.v))
    found = ratios(p, (*got, *gradients))
    wrong = {name: ratio for name, ratio in found.items() if ratio > 1 and (backward or name in ("out", "lse"))}
    assert not wrong, f"error over bound {wrong}: {p} {options}"
    return got


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def problems(headdim: int, dtype: torch.dtype) -> list[Problem]:
    """Full and causal masks and windows, GQA, more and fewer queries than keys; lengths of 0, of 1, short, odd."""
    kw = {"headdim": headdim, "dtype": dtype}
    return [
        problem((2, 65), (2, 203), **kw),
        problem((1, 257), (1, 257), heads=(3, 3), causal=True, **kw),
        problem((1, 130), (1, 70), causal=True, **kw),
        problem([113, 0, 1, 200, 5], [70, 3, 1, 333, 0], heads=(4, 2), causal=True, tails=(7, 70), **kw),
        problem([260, 31, 0], [260, 31, 0], window=(100, 20), tails=(1, 1), **kw),
        problem([0, 64], [5, 0], **kw),
    ]


def check_all(forward, backward, headdim: int, dtype: torch.dtype) -> None:
    for i, p in enumerate(problems(headdim, dtype)):
        policy, seed = ORDERS[i % len(ORDERS)]
        check(p, forward, backward, policy=policy, seed=seed)


# --- the kernels


@pytest.mark.parametrize(("headdim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)], ids=str)
def test_sm90_forward(headdim, dtype):
    check_all(build("sm90", "fwd", headdim, dtype), None, headdim, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("headdim", [80, 96, 192, 256])
def test_sm90_forward_of_other_headdims(headdim, dtype):
    check_all(build("sm90", "fwd", headdim, dtype), None, headdim, dtype)


def test_sm90_forward_in_any_order_of_events():
    """Persistent blocks with more tiles than blocks; the result does not depend on the order, to the last bit."""
    forward = build("sm90", "fwd", 64, torch.bfloat16)
    p = problem([300, 5, 0, 450, 64], [300, 5, 0, 450, 64], 64, causal=True, tails=(3, 3))
    first = check(p, forward)
    for policy, seed in ORDERS:
        for multiprocessors in (1, 3):
            out, lse = emulation.run(p, forward, policy=policy, seed=seed, multiprocessors=multiprocessors)
            assert same_bits(out, first[0])
            assert same_bits(lse, first[1])


def test_sm90_forward_keeps_sequences_apart():
    """NaN in one sequence leaves the others as they are, bit for bit, on both sides of it."""
    forward = build("sm90", "fwd", 128, torch.float16)
    lengths = [70, 33, 129]
    p = problem(lengths, lengths, 128, torch.float16, causal=True)
    out, lse = emulation.run(p, forward)
    for x in (p.q, p.k, p.v):
        x[70:103] = math.nan
    with_nan, lse_with_nan = emulation.run(p, forward, seed=1)
    for rows in (slice(0, 70), slice(103, None)):
        assert same_bits(with_nan[rows], out[rows])
        assert same_bits(lse_with_nan[:, rows], lse[:, rows])


def pair(family: str, headdim: int, dtype: torch.dtype, grant_kb: int = 163):
    return [build(family, direction, headdim, dtype, grant_kb) for direction in ("fwd", "bwd")]


@pytest.mark.parametrize(("family", "headdim", "dtype"), [("sm80", 64, torch.bfloat16)], ids=str)
def test_backward(family, headdim, dtype):
    check_all(*pair(family, headdim, dtype), headdim, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("grant_kb", [163, 99])
@pytest.mark.parametrize("headdim", [96, 128, 192, 256])
def test_sm80_backward_of_other_tiles(headdim, grant_kb):
    check_all(*pair("sm80", headdim, torch.float16, grant_kb), headdim, torch.float16)


@pytest.mark.parametrize(("family", "headdim"), [("sm80", 64)])
def test_backward_in_a_fixed_order(family, headdim):
    """Blocks at once add to dq: its bits depend on who comes first, unless deterministic; those of dk, dv never do."""
    forward, backward = pair(family, headdim, torch.bfloat16)
    p = problem((1, 500), (1, 500), headdim, heads=(1, 1))
    out, lse = emulation.run(p, forward)
    found: dict[bool, set[bytes]] = {True: set(), False: set()}
    dkv = set()
    for deterministic, bits in found.items():
        for seed in range(3):
            dq, *rest = backward(p.dout, p.q, p.k, p.v, out, lse, seed=seed, deterministic=deterministic)
            bits.add(dq.float().numpy().tobytes())
            dkv.add(torch.cat(rest).float().numpy().tobytes())
    assert len(dkv) == len(found[True]) == 1
    assert len(found[False]) > 1, "the order of blocks should show"


# --- the emulator: faults are found


class Fault(NamedTuple):
    text: str
    instead: str
    error: str | None  # part of its text; None: nothing but a wrong result, in some order of events
    file: str = "sm90/fwd.cuh"
    headdim: int = 64


WGMMA = "ptx/wgmma.cuh"
WAIT_S = "ptx::wgmma_wait<1>();\n      ptx::wgmma_pin(acc_s);"
RELEASE_K = "\n      release(Barrier::kKEmpty, k_slot);"
READ_Q = "sync_warpgroup();  // this warpgroup's products have read Q"
FAULTS = {
    "S is read before its product has ended": Fault(WAIT_S, "ptx::wgmma_pin(acc_s);", "race"),
    "K is released before its product has ended": Fault(WAIT_S + RELEASE_K, RELEASE_K + WAIT_S, "race"),
    "K is not waited for": Fault("      --n_block;\n      wait_k();", "      --n_block;", "race"),
    "a parity is the other one": Fault("k_slot.index), k_slot.parity)", "k_slot.index), !k_slot.parity)", ""),
    "a barrier waits for one arrival more": Fault(
        "kVEmpty + i), kConsumers * 4", "kVEmpty + i), kConsumers * 5", "deadlock"
    ),
    "a barrier waits for fewer bytes": Fault(
        "* 8, Config::kKV_bytes", "* 8, Config::kKV_bytes / 2", "more bytes than announced"
    ),
    "no fence between stores and TMA": Fault("ptx::fence_async_proxy();", "", "no fence.proxy.async"),
    "no fence before wgmma": Fault("pin(acc_s);\n    ptx::wgmma_fence();", "pin(acc_s);", "wgmma.fence"),
    "Q is loaded while O leaves": Fault(
        "ptx::tma_store_wait_read();\n      ptx::mbarrier_arrive", "ptx::mbarrier_arrive", "race"
    ),
    "the block ends while O leaves": Fault("if (leader) ptx::tma_store_wait_read();", "", "ends before its bulk store"),
    "O overwrites what others multiply": Fault(READ_Q, "", "race", headdim=192),
    "O of other warps is not waited for": Fault(
        "fence_async_proxy();\n      sync_warpgroup();", "fence_async_proxy();", ""
    ),
    "barriers are used at once": Fault(
        "  __syncthreads();\n\n  const int warpgroup", "  const int warpgroup", "initialis"
    ),
    "barriers are not fenced": Fault("ptx::fence_mbarrier_init();", "", "no fence.mbarrier_init"),
    "the list of tiles is not waited for": Fault("ptx::wait_for_previous_kernel();", "", "has not waited"),
    "O has another swizzle": Fault("Swizzle<Slab::kWidth>", "Swizzle<32>", "race"),
    "operands have another swizzle": Fault("kRowBytes == 128 ? 1 : 2", "kRowBytes == 128 ? 2 : 1", "", WGMMA),
    "operands have another stride": Fault("kEightRows = 8 * kRowBytes", "kEightRows = 4 * kRowBytes", None, WGMMA),
    "a packed pair is exchanged": Fault('"f"(high), "f"(low)', '"f"(low), "f"(high)', None, "ptx/mma.cuh"),
    "the ragged map does not come back": Fault(
        "<< 34) - row_bytes", "<< 34)", "belongs to no tensor", "sm90/tensor_map.h"
    ),
    "an instruction that does not exist": Fault("commit_group.sync", "commit_groups.sync", "commit_groups", WGMMA),
}


def outcome(forward, p: Problem, right: Tensor, policy: str, seed: int) -> str:
    """The error's text, "wrong result" or ""."""
    try:
        out, _ = emulation.run(p, forward, policy=policy, seed=seed)
    except emulation.EmulationError as error:
        return str(error)
    return "" if same_bits(out, right) else "wrong result"


@functools.cache
def right_forward(headdim: int) -> tuple[Problem, Tensor]:
    lengths = [300, 5, 0, 450, 64]
    p = problem(lengths, lengths, headdim, tails=(3, 3))
    return p, emulation.run(p, build("sm90", "fwd", headdim, torch.bfloat16))[0]


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    fault = FAULTS[name]
    p, right = right_forward(fault.headdim)
    edits = {fault.file: [(fault.text, fault.instead)]}
    faulty = emulation.build("sm90", "fwd", fault.headdim, torch.bfloat16, edits=edits)
    # Launches do not overlap where everything happens early.
    orders = [order for order in ORDERS if order[0] != "early" or "list of tiles" not in name]
    found = [outcome(faulty, p, right, policy, seed) for policy, seed in orders]
    if fault.error is None:
        assert "wrong result" in found
    else:
        assert all(text not in ("", "wrong result") and fault.error in text for text in found), found


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("ptx::cp_async_wait<0>();\n    __syncthreads();", "__syncthreads();"),
        ("ptx::cp_async_wait<0>();\n    __syncthreads();", "ptx::cp_async_wait<0>();"),
    ],
    ids=["copies are not waited for", "other threads' copies are not waited for"],
)
def test_faults_of_the_sm80_forward_are_found(text, instead):
    p = problem((1, 200), (1, 300), 64)
    right, _ = emulation.run(p, build("sm80", "fwd", 64, torch.bfloat16))
    faulty = emulation.build("sm80", "fwd", 64, torch.bfloat16, edits={"sm80/fwd.cuh": [(text, instead)]})
    assert all("race" in outcome(faulty, p, right, policy, seed) for policy, seed in ORDERS)


def test_a_deadlock_says_who_waits_for_what():
    faulty = emulation.build(
        "sm90",
        "fwd",
        64,
        torch.bfloat16,
        edits={"sm90/fwd.cuh": [("ptx::mbarrier_arrive(barrier(Barrier::kTileFull));", "")]},
    )
    with pytest.raises(
        emulation.EmulationError, match=r"block 0, warp 1: mbarrier at \d+ .*0: phase 0, 1 of 1 arrivals"
    ):
        emulation.run(problem((1, 64), (1, 64), 64), faulty)
