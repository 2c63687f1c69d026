"""The Hopper backward without a GPU: in the emulator of `emulation/`, against float64 and bit by bit against itself;
and faults put into it are found. The cases are those that break attention kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fa2.bench.correctness import Problem, cu_seqlens, exact, ratios

from . import emulation
from .emulation.problems import normal, problem

pytestmark = [
    pytest.mark.skipif(emulation.why_not() is not None, reason=str(emulation.why_not())),
    pytest.mark.usefixtures("one_torch_thread"),
]

BF16, FP16 = torch.bfloat16, torch.float16
# One thread block a tile, with all of a tile's columns of dQ in one; and a cluster of two.
KERNELS = [(64, BF16), (128, FP16), (256, BF16)]
MORE_KERNELS = [(d, dtype) for d in (64, 80, 96, 128, 192, 256) for dtype in (BF16, FP16) if (d, dtype) not in KERNELS]
ORDERS = [("early", 0), ("late", 1), ("random", 2), ("random", 3)]
each_kernel = pytest.mark.parametrize(("native", "dtype"), KERNELS, ids=str)
each_family = pytest.mark.parametrize(("native", "dtype"), [(64, BF16), (256, BF16)], ids=str)
each_other_kernel = pytest.mark.parametrize(("native", "dtype"), MORE_KERNELS, ids=str)


def build(direction: str, native: int, dtype: torch.dtype, edits: emulation.Edits | None = None) -> emulation.Kernel:
    return emulation.build("sm90", direction, native, dtype, edits=edits)


@functools.cache
def backward_of(native: int, dtype: torch.dtype) -> emulation.Kernel:
    return build("bwd", native, dtype)


class Forward(NamedTuple):
    out: Tensor
    lse: Tensor


def forward_of(p: Problem) -> Forward:
    """What the forward hands to the backward, from float64: shared by the runs that must be bit-equal."""
    (out, lse, *_), _ = exact(p, torch.float64)
    out, lse = out.to(p.q.dtype).reshape(p.q.shape), lse.float()
    if p.q_lengths is None:
        lse = lse.unflatten(1, p.q.shape[:2]).transpose(0, 1)
    return Forward(out, lse.contiguous())


def run(kernel: emulation.Kernel, p: Problem, forward: Forward, **options) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; `options` as of a kernel's call."""
    longest = p.k.shape[1]
    if p.q_lengths is not None and p.k_lengths is not None:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (cu_seqlens(n, "cpu") for n in (p.q_lengths, p.k_lengths))
        longest = max(p.k_lengths, default=0)
    # As the public functions: a bound of the longest sequence's keys or more is none.
    window = tuple(-1 if bound >= longest else bound for bound in p.window)
    return kernel(
        p.dout, p.q, p.k, p.v, *forward, causal=p.causal, window=window, softmax_scale=p.scale, **options
    )  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(kernel: emulation.Kernel, p: Problem, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Within the tolerance, and 0 where no query or no key is."""
    forward = forward_of(p)
    got = run(kernel, p, forward, **options)
    found = ratios(p, (*forward, *got))
    wrong = {name: ratio for name, ratio in found.items() if not ratio <= 1}
    assert not wrong, f"error over bound {wrong}: {p} {options}"
    if p.q_lengths is not None and p.k_lengths is not None:
        for x, lengths in zip(got, (p.q_lengths, p.k_lengths, p.k_lengths), strict=True):
            assert bool((x[sum(lengths) :] == 0).all()), f"tokens of no sequence: {p} {options}"
        assert bool((got[0].movedim(0, -1)[..., (forward.lse == -math.inf).all(0)] == 0).all())
    return got


def check_all(kernel: emulation.Kernel, problems: Sequence[Problem]) -> None:
    """Each in another order of events, every other one deterministic."""
    for i, p in enumerate(problems):
        policy, seed = ORDERS[i % len(ORDERS)]
        check(kernel, p, policy=policy, seed=seed, deterministic=i % 2 == 1, multiprocessors=2 + 2 * (i % 3))


# --- right results


def masks(headdim: int, dtype: torch.dtype) -> list[Problem]:
    """Full, causal, windows; more and fewer queries than keys; rows without keys; groups of query heads."""
    kw = {"headdim": headdim, "dtype": dtype}
    return [
        problem((2, 65), (2, 203), **kw),
        problem((1, 257), (1, 257), heads=(3, 1), causal=True, **kw),  # dq written, added to, and again, in each head
        problem((1, 230), (1, 70), causal=True, **kw),  # the first 160 queries see nothing
        problem((1, 70), (1, 290), causal=True, heads=(1, 1), **kw),
        problem((1, 290), (1, 290), window=(100, 20), heads=(1, 1), **kw),
        problem((1, 300), (1, 150), window=(0, 0), heads=(2, 2), **kw),
        problem((1, 90), (1, 290), window=(-1, 33), heads=(6, 2), **kw),
        problem((1, 150), (1, 150), window=(17, -1), heads=(7, 1), causal=True, **kw),
    ]


@each_kernel
def test_masks(native, dtype):
    check_all(backward_of(native, dtype), masks(native, dtype))


@pytest.mark.thorough
@each_other_kernel
def test_masks_of_other_kernels(native, dtype):
    check_all(backward_of(native, dtype), masks(native, dtype))


def batches(headdim: int, dtype: torch.dtype) -> list[Problem]:
    """Sequences of no queries, no keys or neither, at either end and between; lengths around tiles; NaN behind them."""
    kw = {"headdim": headdim, "dtype": dtype}
    lengths = [1, 63, 64, 65, 127, 128, 129, 200]
    return [
        problem([0, 113, 0, 1, 200, 5, 0], [0, 70, 3, 1, 333, 0, 0], heads=(4, 2), causal=True, tails=(7, 70), **kw),
        problem([5, 0, 140], [0, 6, 260], tails=(1, 129), **kw),
        problem(lengths, lengths[::-1], heads=(1, 1), causal=True, **kw),
        problem(lengths, lengths, heads=(2, 2), causal=True, tails=(3, 0), **kw),
        problem([260, 31, 0, 70], [31, 260, 9, 0], window=(100, 20), tails=(1, 1), **kw),
    ]


@each_family
def test_batches(native, dtype):
    check_all(backward_of(native, dtype), batches(native, dtype))


@pytest.mark.thorough
@pytest.mark.parametrize(("native", "dtype"), [(128, FP16), *MORE_KERNELS], ids=str)
def test_batches_of_other_kernels(native, dtype):
    check_all(backward_of(native, dtype), batches(native, dtype))


# However small the problem: two heads' tiles alternate, then the next two's. sm90/bwd_parts.cuh, HeadOrder.
TWO_HEADS_AT_ONCE = ("fminf(fitting, all_heads)", "fminf(2, all_heads)")


def heads_in_groups(headdim: int, dtype: torch.dtype) -> list[Problem]:
    """Few multiprocessors: groups of one or two heads, and then the wide end."""
    kw = {"headdim": headdim, "dtype": dtype}
    return [
        problem((1, 70), (1, 200), heads=(10, 5), causal=True, **kw),
        problem((2, 40), (2, 130), heads=(3, 3), **kw),
        problem((3, 65), (3, 100), heads=(2, 2), window=(50, 5), **kw),
        problem([70, 0, 33], [150, 9, 133], heads=(5, 5), causal=True, **kw),
        problem([33, 140], [133, 40], heads=(7, 7), tails=(2, 1), **kw),
    ]


@each_family
def test_heads_in_groups(native, dtype):
    """Right, and the bits of all heads at once."""
    kernel = build("bwd", native, dtype, {"sm90/bwd_parts.cuh": [TWO_HEADS_AT_ONCE]})
    for i, p in enumerate(heads_in_groups(native, dtype)):
        wanted = run(backward_of(native, dtype), p, forward_of(p), deterministic=True)
        policy, seed = ORDERS[i % len(ORDERS)]
        got = check(kernel, p, deterministic=True, multiprocessors=2, policy=policy, seed=seed)
        assert all(map(same_bits, got, wanted)), p
        _, *wanted_loose = run(backward_of(native, dtype), p, forward_of(p))
        _, *loose = check(kernel, p, multiprocessors=2 + 2 * (i % 3), seed=i)
        assert all(map(same_bits, loose, wanted_loose)), p


def check_headdim(headdim: int, native: int, dtype: torch.dtype) -> None:
    kernel = backward_of(native, dtype)
    check(kernel, problem([70, 0, 150], [70, 9, 200], headdim, dtype, heads=(2, 1), tails=(2, 3), causal=True))
    check(kernel, problem((1, 100), (1, 140), headdim, dtype), deterministic=True, seed=1)


@pytest.mark.parametrize(
    ("headdim", "native"), [(8, 64), (40, 64), (72, 80), (80, 80), (104, 128), (128, 128), (200, 256), (224, 256)]
)
def test_headdims(headdim, native):
    check_headdim(headdim, native, dict(KERNELS).get(native, BF16))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("headdim", "native"),
    [(8, 64), (16, 64), (48, 64), (72, 80), (80, 80), (96, 96), (104, 128), (112, 128), (136, 192), (160, 192),
     (168, 192), (192, 192), (200, 256), (232, 256), (248, 256)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_more_headdims(headdim, native, dtype):
    check_headdim(headdim, native, dtype)


@each_family
def test_nothing_to_do(native, dtype):
    """No query, no key, or no sequence that has both: zeros, and no hang."""
    kernel = backward_of(native, dtype)
    for q, k in (([0, 0], [3, 200]), ([3, 200], [0, 0]), ([0], [0])):
        p = problem(q, k, native, dtype, tails=(2, 130) if sum(q + k) == 0 else (0, 0))
        forward = Forward(torch.zeros_like(p.q), torch.full((2, len(p.q)), -math.inf))
        for deterministic in (False, True):
            gradients = run(kernel, p, forward, deterministic=deterministic)
            assert all(bool((x == 0).all()) for x in gradients)
    for rows_q, rows_k in ((0, 130), (130, 0)):
        p = problem((2, rows_q), (2, rows_k), native, dtype)
        forward = Forward(torch.zeros_like(p.q), torch.full((2, 2, rows_q), -math.inf))
        gradients = run(kernel, p, forward, deterministic=True)
        assert all(bool((x == 0).all()) for x in gradients)


KV_EMPTY = "ptx::mbarrier_wait(barrier(Barrier::kKVEmpty)"


@pytest.mark.parametrize(("native", "file"), [(64, "sm90/bwd.cuh"), (256, "sm90/bwd_pair.cuh")])
def test_tiles_without_queries_do_not_overtake_the_loads(native, file):
    """However slow the thread that loads K and V: a tile without queries waits for nothing that it loads."""
    slow = {file: [(KV_EMPTY, "for (int i = 0; i < 300; ++i) __nanosleep(64);\n" + KV_EMPTY)]}
    kernel = build("bwd", native, BF16, slow)
    p = problem([64, 0, 70], [700, 300, 70], native, window=(0, 0), heads=(1, 1))
    for policy, seed in ORDERS[1:3]:
        check(kernel, p, policy=policy, seed=seed, multiprocessors=2)


@each_family
def test_large_values_and_odd_scales(native, dtype):
    kernel = backward_of(native, dtype)
    p = problem([130, 33], [200, 33], native, dtype, causal=True, scale=0.03)
    for x in (p.q, p.k):
        x *= 5
    check(kernel, p)


# --- the same bits


def part(p: Problem, forward: Forward, i: int) -> tuple[Problem, Forward, tuple[slice, slice]]:
    """Sequence i of a batch by itself, and where its rows are."""
    assert p.q_lengths is not None
    assert p.k_lengths is not None
    q, k = (slice(sum(n[:i]), sum(n[: i + 1])) for n in (p.q_lengths, p.k_lengths))
    alone = Problem(
        p.q[q], p.k[k], p.v[k], p.dout[q], [p.q_lengths[i]], [p.k_lengths[i]], p.causal, p.window, p.scale
    )  # fmt: skip
    return alone, Forward(forward.out[q], forward.lse[:, q].contiguous()), (q, k)


@each_family
def test_a_sequence_alone(native, dtype):
    """As in a batch, packed and dense, bit by bit."""
    kernel = backward_of(native, dtype)
    p = problem([70, 133, 257], [70, 200, 190], native, dtype, causal=True)
    forward = forward_of(p)
    options = {"deterministic": True, "multiprocessors": 4}
    batch = run(kernel, p, forward, policy="late", **options)
    loose_batch = run(kernel, p, forward, policy="late")
    for i in range(3):
        alone, its, (q, k) = part(p, forward, i)
        packed = run(kernel, alone, its, seed=i, **options)
        dense = Problem(*(x[None] for x in (alone.q, alone.k, alone.v, alone.dout)), causal=True)
        got = run(kernel, dense, Forward(its.out[None], its.lse[None]), seed=i, **options)
        loose = run(kernel, alone, its, seed=i)
        for x, y, z, rows in zip(batch, packed, got, (q, k, k), strict=True):
            assert same_bits(x[rows], y)
            assert same_bits(x[rows], z[0])
        for x, y in zip(loose_batch[1:], loose[1:], strict=True):
            assert same_bits(x[k], y)


@each_family
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
def test_sequences_are_kept_apart(native, dtype, poison):
    """NaN or infinity in one sequence leaves the others as they are, bit for bit, on both sides of it."""
    kernel = backward_of(native, dtype)
    lengths = [70, 33, 129, 30]
    p = problem(lengths, lengths, native, dtype, causal=True)
    forward = forward_of(p)
    clean = run(kernel, p, forward, deterministic=True)
    for bad in (slice(70, 103), slice(103, 232)):
        q, k, v, dout, out = (x.clone() for x in (p.q, p.k, p.v, p.dout, forward.out))
        lse = forward.lse.clone()
        for x in (q, k, v, dout, out):
            x[bad] = poison
        lse[:, bad] = math.nan
        spoiled = Problem(q, k, v, dout, lengths, lengths, causal=True)
        got = run(kernel, spoiled, Forward(out, lse), deterministic=True, seed=1)
        for x, y in zip(got, clean, strict=True):
            assert same_bits(x[: bad.start], y[: bad.start])
            assert same_bits(x[bad.stop :], y[bad.stop :])


@each_family
def test_a_hidden_nan_meets_no_query(native, dtype):
    """A NaN in the value of a key leaves the queries that do not see it as they are."""
    kernel = backward_of(native, dtype)
    p = problem([150], [150], native, dtype, causal=True)
    forward = forward_of(p)
    clean = run(kernel, p, forward, deterministic=True)[0]
    p.v[-1] = forward.out[-1] = math.nan
    dq = run(kernel, p, forward, deterministic=True, seed=1)[0]
    assert bool(dq[-1].isnan().any())
    assert same_bits(dq[:-1], clean[:-1])


def sums_of(kernel: emulation.Kernel, p: Problem, forward: Forward, **options) -> tuple[Tensor, ...]:
    """dq, dk, dv, and dq's sums in fp32: the order of additions shows there, and seldom after rounding."""
    scratch = []
    ordinary = emulation._poisoned

    def kept(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        scratch.append(ordinary(shape, dtype))
        return scratch[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "_poisoned", kept)
        gradients = run(kernel, p, forward, **options)
    (sums,) = (x for x in scratch if x.dtype == torch.float32 and x.shape == (*forward.lse.shape, kernel.headdim))
    return (*gradients, sums)


def check_repeats(kernel: emulation.Kernel, p: Problem, orders: Sequence[tuple[str, int, int]]) -> None:
    forward = forward_of(p)
    first = sums_of(kernel, p, forward, deterministic=True)
    _, *first_loose = run(kernel, p, forward)
    for policy, seed, multiprocessors in orders:
        options = {"policy": policy, "seed": seed, "multiprocessors": multiprocessors}
        assert all(map(same_bits, sums_of(kernel, p, forward, deterministic=True, **options), first)), options
        _, *loose = run(kernel, p, forward, **options)
        assert all(map(same_bits, loose, first_loose)), options


@each_kernel
def test_any_order_of_events(native, dtype):
    """Blocks that wait for each other's turn: dk and dv have the same bits in any order, dq when deterministic."""
    kernel = backward_of(native, dtype)
    p = problem([130, 5], [900, 5], native, dtype, heads=(1, 1), causal=native == 128)
    check_repeats(kernel, p, [("late", 1, 6), ("random", 2, 6), ("random", 3, 4)])
    p = problem((1, 150), (1, 300), native, dtype, heads=(3, 1), window=(200, -1))
    check_repeats(kernel, p, [("late", 1, 2), ("early", 2, 6), ("random", 3, 3)])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 40)}], ids=str)
@pytest.mark.parametrize("native", [64, 80, 96, 128, 192, 256])
def test_many_orders_of_events(native, options):
    orders = [(policy, seed, sms) for policy in ("early", "late", "random") for seed in range(2) for sms in (2, 4, 6)]
    p = problem([300, 5, 260], [300, 5, 900], native, heads=(2, 1), **options)
    check_repeats(backward_of(native, BF16), p, orders)


@each_family
def test_the_order_of_blocks_shows(native, dtype):
    """When not deterministic: otherwise the tests above test nothing."""
    kernel = backward_of(native, dtype)
    p = problem((1, 128), (1, 900), native, dtype, heads=(1, 1))
    forward = forward_of(p)
    sums = [sums_of(kernel, p, forward, seed=seed, multiprocessors=6)[3] for seed in range(3)]
    assert not all(same_bits(x, sums[0]) for x in sums)


# --- layouts


@each_family
@pytest.mark.parametrize("varlen", [True, False])
def test_strided_inputs_and_packed_gradients(native, dtype, varlen, monkeypatch):
    """q, k, v of one tensor, dout and out transposed or expanded; the gradients go into one tensor, beside others'."""
    kernel = backward_of(native, dtype)
    lengths, heads = [70, 0, 133], 2
    shape = (sum(lengths),) if varlen else (2, 133)
    qkv = normal(*shape, 3, heads, native, dtype=dtype, seed=0)
    q, k, v = qkv.unbind(-3)
    dout = normal(*shape[:-1], heads, shape[-1], native, dtype=dtype, seed=1).transpose(-3, -2)
    options = {"q_lengths": lengths, "k_lengths": lengths} if varlen else {}
    p = Problem(q, k, v, dout, causal=True, **options)
    forward = forward_of(p)
    plain = Problem(*(x.contiguous() for x in (q, k, v, dout)), causal=True, **options)
    wanted = run(kernel, plain, forward, deterministic=True)

    beyond = 130 if varlen else 1
    packed = torch.full((shape[0] + beyond, *shape[1:], 4, heads, native), math.nan, dtype=dtype)
    parts = iter(packed[: shape[0]].unbind(-3))
    ordinary = emulation._poisoned
    with monkeypatch.context() as patch:
        patch.setattr(emulation, "_poisoned", lambda s, d: next(parts) if d == dtype else ordinary(s, d))
        out = forward.out.transpose(-3, -2).contiguous().transpose(-3, -2)
        got = run(kernel, p, Forward(out, forward.lse), deterministic=True, seed=1)
    for x, y in zip(got, wanted, strict=True):
        assert same_bits(x, y)
    assert bool(packed[..., 3, :, :].isnan().all()), "what lies beside the gradients is untouched"
    assert bool(packed[shape[0] :].isnan().all()), "what lies behind the gradients is untouched"

    one = p.dout[..., :1, :]
    expanded = Problem(q, k, v, one.expand_as(p.q), causal=True, **options)
    copied = Problem(q, k, v, one.expand_as(p.q).contiguous(), causal=True, **options)
    for x, y in zip(*(run(kernel, z, forward, deterministic=True) for z in (expanded, copied)), strict=True):
        assert same_bits(x, y)


# --- faults are found


class Fault(NamedTuple):
    file: str
    text: str
    instead: str
    native: int = 128


ONE, PAIR, PARTS, CONFIG = ("sm90/bwd.cuh", "sm90/bwd_pair.cuh", "sm90/bwd_parts.cuh", "sm90/config.h")
QUEUE = "sm90/bwd_queue.cuh"
PREPROCESS = "sm80/bwd_preprocess.cuh"
DS_FULL = "ptx::mbarrier_arrive(barrier(Barrier::kDsFull) + step_count"
DS_FULL_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kDsFull) + count % 2 * 8, count / 2 % 2);"
DS_EMPTY_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kDsEmpty) + step_count % 2 * 8, step_count / 2 % 2 ^ 1);"
DQ_FULL = "ptx::mbarrier_arrive(barrier(Barrier::kDqFull)"
DQ_FULL_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kDqFull + slot_dq.index), slot_dq.parity);"
DQ_EMPTY = "ptx::mbarrier_arrive(barrier(Barrier::kDqEmpty + slot_dq.index));"
DQ_EMPTY_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kDqEmpty) + dq_count % 2 * 8, dq_count / 2 % 2 ^ 1);"
TURN_EMPTY_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kTurnEmpty), turn_parity ^ 1);"
ADDED_EMPTY_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kAddedEmpty), turn_parity ^ 1);"
ADDED_FULL_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kAddedFull), added_parity);"
PASS_TURN = "ptx::red_release_add(turn_counter(p, *work, steps.m_block, steps.head), 1);"
DO_FULL_WAIT = "ptx::mbarrier_wait(barrier(Barrier::kDoFull + stage), slot.parity);"
LAST = "mask.key_blocks<kBlockM, kBlockN>(m_block)"
HALF_A_STEP = "if (first && consumer == 0) ptx::barrier_arrive"
WAIT_DQ = """ptx::wgmma_wait<1>();
        ptx::wgmma_pin(acc_dq);
        ptx::wgmma_pin(acc_dk);
        ptx::wgmma_pin(acc_dv);
"""
RELEASE_Q = """        __syncwarp();  // lse and delta, too, have been read by all lanes
        if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kQEmpty + stage));
"""
WAIT_LAST_DQ = """ptx::wgmma_wait<0>();
      ptx::wgmma_pin(acc_dq);
      """
RELEASE_KEYS = """__syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kKVEmpty));
      """
COPY_TILE = """for (int i = 0; i < static_cast<int>(sizeof(BwdWork) / 4); ++i)
          ptx::store_cluster_4(copy + i * 4, words[i]);
        """
ARRIVE_TILE = "ptx::mbarrier_arrive_cluster(ptx::cluster_address(barrier(Barrier::kTileFull + work_slot.index), 1));"
# What must be seen in some order of events: a wrong result, or an error.
FAULTS = {
    # one block: dS
    "dS is not waited for": Fault(ONE, DS_FULL_WAIT, ""),
    "dS is the one before": Fault(ONE, DS_FULL_WAIT, DS_FULL_WAIT.replace("2);", "2 ^ 1);")),
    "dS of one consumer is waited for": Fault(ONE, "kDsFull + i), kConsumers * 4)", "kDsFull + i), 4)"),
    "dS is multiplied without a fence": Fault(
        ONE,
        "ptx::fence_async_proxy();\n        __syncwarp();\n        if (lane == 0) " + DS_FULL,
        "__syncwarp();\n        if (lane == 0) " + DS_FULL,
    ),
    "dS is multiplied before all lanes have written it": Fault(
        ONE, "__syncwarp();\n        if (lane == 0) " + DS_FULL, "if (lane == 0) " + DS_FULL
    ),
    "dS is overwritten while it is multiplied": Fault(ONE, DS_EMPTY_WAIT, ""),
    "dS is released by one consumer": Fault(ONE, "kDsEmpty + i), kConsumers * 4)", "kDsEmpty + i), 4)"),
    "dS's place is never free": Fault(ONE, DS_EMPTY_WAIT, DS_EMPTY_WAIT.replace(" ^ 1", "")),
    "dS is not released": Fault(
        ONE, "if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDsEmpty) + count % 2 * 8);", ""
    ),
    "dS has one buffer": Fault(ONE, "% 2 * Config::kDs_bytes", "* 0"),
    "dS's second buffer is dQ's": Fault(CONFIG, "kDsStages * kDs_bytes", "kDs_bytes"),
    "dQ is of this step": Fault(
        ONE, "start_dq(step_count - 1);\n        } else", "start_dq(step_count);\n        } else"
    ),
    "dV is written over dS": Fault(ONE, "sync_consumers();  // both have finished with dS", ""),
    # dQ
    "dQ leaves before both have written it": Fault(ONE, "kDqFull + i), kConsumers * 4)", "kDqFull + i), 4)"),
    "dQ is not waited for": Fault(ONE, DQ_FULL_WAIT, ""),
    "dQ leaves without a fence": Fault(
        ONE,
        "ptx::fence_async_proxy();\n        __syncwarp();\n        if (lane == 0) " + DQ_FULL,
        "__syncwarp();\n        if (lane == 0) " + DQ_FULL,
    ),
    "dQ leaves before all lanes have written it": Fault(
        ONE, "__syncwarp();\n        if (lane == 0) " + DQ_FULL, "if (lane == 0) " + DQ_FULL
    ),
    "dQ is written while it leaves": Fault(ONE, DQ_EMPTY_WAIT + "\n        dq_is_stored", "dq_is_stored"),
    "dQ's place is never free": Fault(ONE, DQ_EMPTY_WAIT, DQ_EMPTY_WAIT.replace(" ^ 1", "")),
    "dQ is released before it has been read": Fault(
        ONE, "ptx::tma_store_wait_read();\n        " + DQ_EMPTY, DQ_EMPTY + "ptx::tma_store_wait_read();"
    ),
    "dQ is not released": Fault(ONE, DQ_EMPTY, ""),
    "dQ has one buffer": Fault(ONE, "* Config::kDq_bytes", "* 0"),
    "dQ leaves from the other buffer": Fault(ONE, "slot_dq.index * Config", "(slot_dq.index ^ 1) * Config"),
    "dQ's last buffer is handed over twice": Fault(ONE, "++dq_count;\n        dq_is_stored = false;", "++dq_count;"),
    "the last dQ is not handed over": Fault(
        ONE,
        "finish_dq(step_count - 1, flags_before);\n      hand_dq_over();",
        "finish_dq(step_count - 1, flags_before);",
    ),
    "dK's buffer is the other": Fault(
        ONE, "dk_place = Config::kDq + dq_count % 2", "dk_place = Config::kDq + (dq_count + 1) % 2"
    ),
    "dK is written while dQ leaves": Fault(ONE, DQ_EMPTY_WAIT + "  // it is free", ""),
    "dQ is written while dK leaves": Fault(ONE, "if (leader) ptx::tma_store_wait_read();\n    sync", "sync"),
    "dQ is written while the other's dK leaves": Fault(
        ONE, "if (leader) ptx::tma_store_wait_read();\n    sync_consumers();", "if (leader) ptx::tma_store_wait_read();"
    ),
    "a neighbour's dQ is added to": Fault(ONE, "min(kBlockM, work.seqlen_q - first) * kHeadDim", "kBlockM * kHeadDim"),
    "dQ's groups do not change places": Fault(ONE, "((first_group + j) ^ odd)", "(first_group + j)"),
    "dQ's odd rows are counted in the tile": Fault(PARTS, "((work.first_q + first) % 2 != 0", "(first % 2 != 0"),
    "96 columns: the second share is the first": Fault(ONE, "if (kShift > 0 && consumer > 0)", "if (false)", 96),
    "80 columns: what both have made is stored twice": Fault(ONE, "kOfFirst == kGroups || consumer > 0", "true", 80),
    "80 columns: the second share begins too late": Fault(ONE, "consumer * kOfFirst", "consumer * kGroups", 80),
    "80 columns: the last are not set to 0": Fault(PREPROCESS, "(kHeadDim + 31) / 32", "kHeadDim / 32", 80),
    "80 columns: their groups change places": Fault(
        CONFIG, "kAlternates = kHeadDim % 32 == 0", "kAlternates = true", 80
    ),
    "a product of dQ without its fence": Fault(
        ONE, "ptx::wgmma_discard(acc_dq);\n        ptx::wgmma_fence();", "ptx::wgmma_discard(acc_dq);"
    ),
    "dq is written past the end": Fault(PARTS, "if (row + r * 8 < work.seqlen_q && ", "if ("),
    # turns
    "key blocks add in ascending order": Fault(PARTS, LAST + ".last - 1 - n_block", "n_block - " + LAST + ".first"),
    "tiles are handed out in ascending order": Fault(
        PARTS, "work.tile.block = (sequence.seqlen_k - 1) / kBlockN - work.tile.block;", ";"
    ),
    "turns are counted from the last key": Fault(
        PARTS, LAST + ".last - 1 - n_block", "(mask.seqlen_k - 1) / kBlockN - n_block"
    ),
    "no turns": Fault(ONE, "while (ptx::load_acquire(turn)", "if (ptx::load_acquire(turn)"),
    "the turn is not waited for": Fault(ONE, "ptx::mbarrier_wait(barrier(Barrier::kTurnFull), turn_parity);", ""),
    "the next turn is seen before the last one has been": Fault(ONE, TURN_EMPTY_WAIT, ""),
    "a turn is never seen": Fault(ONE, TURN_EMPTY_WAIT, TURN_EMPTY_WAIT.replace(" ^ 1", "")),
    "the last turn of a tile is not waited for": Fault(ONE, "wait_for_turn();\n        __syncwarp();", "__syncwarp();"),
    "who writes dq waits for a turn": Fault(
        ONE, "p.dq_semaphore != nullptr && !step.direct()", "p.dq_semaphore != nullptr"
    ),
    "the turn moves on before the addition": Fault(
        ONE, "ptx::tma_store_wait();\n          ptx::fence_async_proxy_global();", ""
    ),
    "the turn moves on at once": Fault(ONE, ADDED_FULL_WAIT, ""),
    "the turn moves on before the last one has": Fault(ONE, ADDED_EMPTY_WAIT, ""),
    "an addition is never seen": Fault(ONE, ADDED_FULL_WAIT, ADDED_FULL_WAIT.replace("parity", "parity ^ 1")),
    "the turn does not move on": Fault(ONE, PASS_TURN, ""),
    "the turn of another head moves on": Fault(ONE, PASS_TURN, PASS_TURN.replace("steps.head", "steps.head ^ 1")),
    "a turn moves on for who writes dq": Fault(
        ONE, "if (writes_dq<kBlockM, kBlockN>(work->mask(p), steps.m_block)) continue;", ""
    ),
    # steps and what they read
    "the ring of steps is one too short": Fault(CONFIG, "kSteps = 4", "kSteps = 3"),
    "the ring of steps is as long as Q's": Fault(CONFIG, "kSteps = 4", "kSteps = 2"),
    "there is one step": Fault(CONFIG, "kSteps = 4", "kSteps = 1"),
    "a step is read before all lanes have written it": Fault(
        ONE,
        "__syncwarp();\n          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDoFull",
        "if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kDoFull",
    ),
    "delta has the other sign": Fault(PARTS, "? -p.delta[first + row]", "? p.delta[first + row]"),
    "delta is not begun with": Fault(PARTS, "offset), kAdds || k > 0);", "offset), k > 0);"),
    "S is added to what was there": Fault(PARTS, "offset), kAdds || k > 0);", "offset), true);"),
    "rows past the end have a delta": Fault(
        PARTS, "p.lse_log2[first + row] : INFINITY", "p.lse_log2[first + row] : NAN"
    ),
    "Q is not waited for": Fault(ONE, "ptx::mbarrier_wait(barrier(Barrier::kQFull + slot.index), slot.parity);", ""),
    "Q is released before it has been read": Fault(ONE, WAIT_DQ + RELEASE_Q, RELEASE_Q + WAIT_DQ),
    "dO is not waited for": Fault(ONE, DO_FULL_WAIT, ""),
    "a parity is the other one": Fault(ONE, DO_FULL_WAIT, DO_FULL_WAIT.replace("parity", "parity ^ 1")),
    "K is not waited for": Fault(ONE, "ptx::mbarrier_wait(barrier(Barrier::kKFull), kv_parity);", ""),
    "V is not waited for": Fault(ONE, "ptx::mbarrier_wait(barrier(Barrier::kVFull), kv_parity);", ""),
    "keys are released while they are multiplied": Fault(ONE, WAIT_LAST_DQ + RELEASE_KEYS, RELEASE_KEYS + WAIT_LAST_DQ),
    "S is read before its product has ended": Fault(ONE, "ptx::wgmma_wait<0>();  // S", ""),
    "dP is read before its product has ended": Fault(ONE, "ptx::wgmma_wait<1>();\n        ptx::wgmma_pin(acc_dp);", ""),
    "dQ is read before its product has ended": Fault(ONE, "ptx::wgmma_wait<1>();\n        ptx::wgmma_pin(acc_dq);", ""),
    "wgmma without its fence": Fault(PARTS, "ptx::wgmma_fence();", ""),
    "the second consumer is not let go": Fault(ONE, HALF_A_STEP, "if (false) ptx::barrier_arrive"),
    "the mask is of the other consumer": Fault(
        ONE, "kBlockN + consumer * 64 + warp_row + lane / 4", "kBlockN + lane / 4"
    ),
    "dK's fence": Fault(ONE, "ptx::fence_async_proxy();\n    sync_warpgroup();", "sync_warpgroup();"),
    "the block ends while dK leaves": Fault(ONE, "if (leader) ptx::tma_store_wait_read();  // shared", "// shared"),
    "a tile is left too early": Fault(
        ONE, "kTileEmpty + i), kConsumers * 4 + 3)", "kTileEmpty + i), kConsumers * 4 + 2)"
    ),
    # which tile is next
    "the wide end begins within a group of heads": Fault(PARTS, "last) / side_by_side * side_by_side;", "last);"),
    "the wide end's heads are the first": Fault(PARTS, "at_the_end ? order.first_last : 0)", "0)"),
    "the wide end's tiles are counted from the first": Fault(
        PARTS, "at_the_end ? index - order.first_last * blocks : index", "index"
    ),
    "heads are mixed up": Fault(PARTS, "head -= group, m_block", "m_block"),
    "the walk down begins too low": Fault(PARTS, "work.blocks.last - 1) {}", "work.blocks.last - 2) {}"),
    # conversion
    "a conversion does not wait": Fault(
        QUEUE, "__shfl_sync(kFullWarp, done, 0) != tiles_here", "__shfl_sync(kFullWarp, done, 0) != 1"
    ),
    "what was added last is not waited for": Fault(ONE, "ptx::tma_store_wait();  // all has been added", ""),
    "a tile counts for another sequence": Fault(
        QUEUE, "work.tile.bidb * p.nheads_kv + work.tile.bidh, 1)", "work.tile.bidh, 1)"
    ),
    "odd rows are converted as even ones": Fault(QUEUE, "(first + row) & 1", "0"),
    "the last rows are not converted": Fault(
        QUEUE, "const bool wanted = row < work.seqlen_q", "const bool wanted = row + 31 < work.seqlen_q"
    ),
    "one head of a group is converted": Fault(
        QUEUE, "for (int i = 0; i < group; ++i) {", "for (int i = 0; i < 1; ++i) {"
    ),
    "rows that tiles have written are converted": Fault(
        QUEUE, " && !writes_dq<kBlockM, kBlockN>(mask, row / kBlockM);", ";"
    ),
    "done tiles are counted from 1": Fault(
        PREPROCESS, "numbers[i] = 0;", "numbers[i] = i >= 2 * p.conversions.capacity + ConversionQueue::kCounters;"
    ),
    "rows without a tile are not set to 0": Fault(PREPROCESS, "source == DqSource::kZero) {", "false) {"),
    "the last tiles are not waited for": Fault(
        QUEUE, "ptx::load_acquire(p.conversions.counters + ConversionQueue::kTilesDone) == tiles", "true"
    ),
    # two blocks
    "the other's dS is not waited for": Fault(
        PAIR,
        "ptx::mbarrier_wait(barrier(Barrier::kOtherFull), other_parity);\n          ds_parity",
        "ds_parity",
        256,
    ),
    "dS is released by one block": Fault(PAIR, "kDsEmpty), 2 * 2 * 4)", "kDsEmpty), 2 * 4)", 256),
    "dS's place is not waited for": Fault(
        PAIR, "ptx::mbarrier_wait(barrier(Barrier::kDsEmpty), ds_parity ^ 1);", "", 256
    ),
    "Q is released by one block": Fault(PAIR, "kQEmpty + i), 2 * 2 * 4)", "kQEmpty + i), 2 * 4)", 256),
    "Q is released in one block": Fault(
        PAIR, "ptx::mbarrier_arrive_cluster_done(ptx::cluster_address(barrier(index), other));", "", 256
    ),
    "a tile is left by one block": Fault(PAIR, "kTileEmpty + i), 2 * (2 * 4 + 2))", "kTileEmpty + i), 2 * 4 + 2)", 256),
    # Reads through a pointer are not followed: only one that comes first is seen.
    "the tile is copied after its arrival": Fault(
        PAIR, COPY_TILE + ARRIVE_TILE, ARRIVE_TILE + "for (int i = 0; i < 99; ++i) __nanosleep(64);\n" + COPY_TILE, 256
    ),
    "P is read before all lanes have written it": Fault(
        PAIR,
        "__syncwarp();\n          if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kPFull))",
        "if (lane == 0) ptx::mbarrier_arrive(barrier(Barrier::kPFull))",
        256,
    ),
    "other warps do not wait for the turn": Fault(PAIR, "sync_warpgroup();\n        turn_to", "turn_to", 256),
    "the last turn of a tile is not passed": Fault(PAIR, "pass_turn();\n      ptx::barrier", "ptx::barrier", 256),
    "Q comes to one block": Fault(PAIR, "steps.head),\n                3);", "steps.head),\n                1);", 256),
    "P is not waited for": Fault(PAIR, "ptx::mbarrier_wait(barrier(Barrier::kPFull), ds_parity);", "", 256),
    "dS leaves without a fence": Fault(
        PAIR, "ptx::fence_async_proxy();\n          sync_warpgroup();  // dS", "sync_warpgroup();  // dS", 256
    ),
    "half of dS is copied": Fault(
        PAIR, "Config::kDs_bytes, ptx::cluster_address", "Config::kDs_bytes / 2, ptx::cluster_address", 256
    ),
    "both load the same half of Q": Fault(PAIR, "kBlockM + rank * Config::kQueryBox, steps", "kBlockM, steps", 256),
    "the other's columns of K": Fault(
        PAIR, "rank * Slab::kCount / 2, Slab::kCount / 2", "other * Slab::kCount / 2, Slab::kCount / 2", 256
    ),
    "barriers are used before the other block is there": Fault(
        PAIR, "ptx::cluster_sync();\n\n  const int warpgroup", "__syncthreads();\n\n  const int warpgroup", 256
    ),
    "a block ends before the other": Fault(PAIR, "ptx::cluster_sync();  // the other block", "// the other block", 256),
    "keys are overwritten while they are multiplied": Fault(
        PAIR, "ptx::barrier_sync(1, 256);  // both", "// both", 256
    ),
    "a turn is half a tile": Fault(PAIR, "ptx::load_acquire(turn) / 4 !=", "ptx::load_acquire(turn) / 2 !=", 256),
    "dQ is added past the end": Fault(PAIR, "if (row + r * 8 < step.rows())\n#pragma", "if (true)\n#pragma", 256),
    "two blocks: key blocks add in ascending order": Fault(
        PARTS, LAST + ".last - 1 - n_block", "n_block - " + LAST + ".first", 256
    ),
    "two blocks: delta has the other sign": Fault(PARTS, "? -p.delta[first + row]", "? p.delta[first + row]", 256),
    "two blocks: the wide end begins within a group of heads": Fault(
        PARTS, "last) / side_by_side * side_by_side;", "last);", 256
    ),
    "the turn is not waited for by anyone": Fault(
        PAIR, "while (ptx::load_acquire(turn)", "if (ptx::load_acquire(turn)", 256
    ),
    "the turn is passed before the addition": Fault(
        PAIR,
        "sync_warpgroup();\n        turn_to_pass = turn;",
        "sync_warpgroup();\n        if (leader) ptx::red_release_add(turn, 1);\n        turn_to_pass = nullptr;",
        256,
    ),
    "nobody says that a tile's loads have begun": Fault(
        PAIR, "if (rank == 0) ptx::mbarrier_arrive(barrier(Barrier::kLoaded));", "", 256
    ),
    "the first tile waits for loads": Fault(PAIR, "uint32_t loaded_parity = 1;", "uint32_t loaded_parity = 0;", 256),
    "lse is not waited for": Fault(PAIR, "wait_do();  // lse comes with it", "", 256),
    "keys come while dK leaves": Fault(
        PAIR,
        "ptx::tma_store_wait_read();\n        ptx::mbarrier_arrive(barrier(Barrier::kKVEmpty));",
        "ptx::mbarrier_arrive(barrier(Barrier::kKVEmpty));\n        ptx::tma_store_wait_read();",
        256,
    ),
    # what is around them
    "the queue is read early": Fault(ONE, "ptx::wait_for_previous_kernel();", ""),
    "dQ is converted early": Fault(
        "sm80/bwd_convert.cuh", "if constexpr (Config::kStartsEarly) ptx::wait_for_previous_kernel();", ""
    ),
    "the list of tiles is not waited for": Fault(
        PREPROCESS, "if constexpr (Config::kStartsEarly) ptx::wait_for_previous_kernel();", ""
    ),
    "unseeing queries are counted in": Fault(
        PREPROCESS, "if constexpr (Config::kSkipsUnseeing)", "if constexpr (false)"
    ),
    "dQ's sums begin anywhere": Fault(PREPROCESS, "} else if (source != DqSource::kDirect) {", "} else if (false) {"),
    "turns begin anywhere": Fault(PREPROCESS, "p.dq_semaphore[i] = 0;", ";"),
}


@functools.cache
def fault_problems(native: int) -> list[tuple[Problem, Forward, bool, tuple[Tensor, ...]]]:
    """Several tiles a block, sequences that end anywhere, windows, rows without keys; many query blocks that one key
    block alone sees; several groups of heads. All deterministic, and grouped heads also the other way round.
    """
    dtype = BF16
    lengths = [390, 5, 0, 190, 33, 63]
    found = []
    for p in (
        problem(lengths, lengths, native, dtype, tails=(130, 1)),  # writes past the end stay inside
        problem([300, 200, 130], [300, 90, 900], native, dtype, heads=(1, 1), window=(700, 10)),
        problem([260, 33, 330], [60, 90, 110], native, dtype, heads=(4, 2)),
        problem((1, 260), (1, 260), native, dtype, causal=True),
        *heads_in_groups(native, dtype),
    ):
        forward = forward_of(p)
        for deterministic in (True, False) if p.q.shape[-2] > p.k.shape[-2] else (True,):
            right = sums_of(backward_of(native, dtype), p, forward, deterministic=deterministic)
            found.append((p, forward, deterministic, right))
    return found


def outcomes(fault: Fault) -> Iterator[str]:
    """By problem and order: the error's text, "wrong result" or ""."""
    edits = {PARTS: [TWO_HEADS_AT_ONCE]}
    edits[fault.file] = [*edits.get(fault.file, []), (fault.text, fault.instead)]
    faulty = build("bwd", fault.native, BF16, edits)
    for p, forward, deterministic, right in fault_problems(fault.native):
        for (policy, seed), multiprocessors in zip(ORDERS, (6, 2, 6, 4), strict=True):
            options = {"policy": policy, "seed": seed, "multiprocessors": multiprocessors}
            try:
                got = sums_of(faulty, p, forward, deterministic=deterministic, **options)
                if deterministic:
                    same = all(map(same_bits, got, right))
                else:  # dq is added up in another order
                    close = (got[0] - right[0]).abs() <= 0.02 * right[0].abs().max()
                    same = bool(close.all()) and all(map(same_bits, got[1:3], right[1:3]))
                yield "" if same else "wrong result"
            except emulation.EmulationError as error:
                yield str(error)


QUICK = ["dS has one buffer", "the wide end begins within a group of heads"]


def test_faults_have_a_place():
    """The texts that they replace are there: most of them are put in with -m thorough alone."""
    for name, fault in FAULTS.items():
        assert fault.text in (emulation.ROOT / "fa2" / "csrc" / fault.file).read_text(), name


@pytest.mark.parametrize("name", QUICK)
def test_faults_are_found(name):
    assert any(outcomes(FAULTS[name]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in QUICK])
def test_more_faults_are_found(name):
    assert any(outcomes(FAULTS[name]))
