"""The CUDA kernels compute what float64 does: every headdim, both tile sizes, masks, lengths, layouts, neighbours that
hold NaN. The rule of the tolerance: `fa2/bench/correctness.py`. How they run (streams, graphs, memory): the next file,
`test_kernels_running_gpu.py`. FA2_TEST_DEVICE=cpu takes the same cases through the CPU kernels.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

import fa2
from fa2.bench.correctness import TILES, Problem, differential, exact, poison, ratios, run, tiles

DEVICE = os.environ.get("FA2_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
pytestmark = pytest.mark.gpu if ON_GPU else []
DTYPES = (torch.bfloat16, torch.float16)
HEADDIMS = (40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
NATIVE = (64, 80, 96, 128, 192, 256)  # one for each size of tile

each_tile_size = pytest.mark.parametrize("size", TILES if ON_GPU else ["newest"])
each_headdim = pytest.mark.parametrize("headdim", NATIVE if ON_GPU else (64,))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, gain: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (gain * torch.randn(*shape, device=DEVICE, generator=generator)).to(dtype)


def varlen(
    q_lengths, k_lengths=None, heads=(2, 2), headdim=64, dtype=torch.bfloat16, gain=1.0, tail=0, **mask
) -> Problem:
    k_lengths = q_lengths if k_lengths is None else k_lengths
    shapes = [(sum(n) + tail, h, headdim) for n, h in ((q_lengths, heads[0]), (k_lengths, heads[1]))]
    q, dout = normal(*shapes[0], dtype=dtype, gain=gain), normal(*shapes[0], dtype=dtype, seed=3)
    k, v = (normal(*shapes[1], dtype=dtype, gain=gain, seed=i) for i in (1, 2))
    return Problem(q, k, v, dout, q_lengths, k_lengths, **mask)


def dense(b, seqlen_q, seqlen_k=None, heads=(2, 2), headdim=64, dtype=torch.bfloat16, gain=1.0, **mask) -> Problem:
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    q, dout = (
        normal(b, seqlen_q, heads[0], headdim, dtype=dtype, gain=gain),
        normal(b, seqlen_q, heads[0], headdim, seed=3),
    )
    k, v = (normal(b, seqlen_k, heads[1], headdim, dtype=dtype, gain=gain, seed=i) for i in (1, 2))
    return Problem(q, k, v, dout.to(dtype), **mask)


def poisoned_run(p: Problem, deterministic: bool = False, **options) -> tuple[Tensor, ...]:
    """`run` in memory that holds NaN (case 4): every test goes through it."""
    poison(DEVICE)
    return run(p, deterministic, **options)


def check(p: Problem, deterministic: bool = False) -> tuple[Tensor, ...]:
    got = poisoned_run(p, deterministic)
    found = ratios(p, got)
    assert max(found.values()) <= 1, f"error over bound {found}: {p}"
    return got


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def assert_same_bits(a, b, what: str = "") -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), a, b, strict=False):
        assert torch.equal(bits(x), bits(y)), f"{name} differs {what}"


# --- shapes and masks


@each_tile_size
@each_headdim
def test_windows_that_few_of_a_tile_see(headdim, size):
    """Parts of a tile see different key blocks, or none, and there are more tiles than multiprocessors."""
    masks = [(0, 0), (3, -1), (200, 0), (130, 64), (-1, 70), (700, 0)]
    with tiles(size):
        for window in masks:
            check(varlen([900, 5, 64, 65, 0, 333, 1200], headdim=headdim, window=window))
            check(varlen([900, 5, 640, 1], [70, 900, 2, 1500], headdim=headdim, window=window, heads=(4, 2)))
        check(dense(3, 5, 1500, headdim=headdim, causal=True))
        check(dense(3, 1500, 5, headdim=headdim, causal=True))


@each_tile_size
def test_rows_without_keys_are_zero_beside_infinite_values(size):
    """1, 5: queries that see no key share a tile with some that do; V's inf must not turn their 0 into NaN."""
    p = dense(1, 100, 50, headdim=64, causal=True)
    p.v[:, 3] = torch.inf
    with tiles(size):
        out, lse, *_ = fa2.flash_attn_func(p.q, p.k, p.v, causal=True, return_attn_probs=True)
    assert bool((out[:, :50] == 0).all())
    assert bool((lse[..., :50] == -torch.inf).all())


@each_tile_size
def test_expanded_inputs(size):
    """Strides of zero: one key head stands for all, one token for a whole sequence."""
    q, dout = normal(2, 150, 4, 64), normal(2, 150, 4, 64, seed=3)
    for shape in ((2, 150, 1, 64), (2, 1, 4, 64), (1, 150, 4, 64)):
        k, v = (normal(*shape, seed=i).expand(2, 150, 4, 64) for i in (1, 2))
        with tiles(size):
            check(Problem(q, k, v, dout, causal=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("headdim", HEADDIMS)
@each_tile_size
def test_every_headdim(headdim, dtype, size):
    """19: native headdims and padded ones, forward and backward, dense and varlen, masks, GQA, a fixed order of dq."""
    with tiles(size):
        kw = {"headdim": headdim, "dtype": dtype}
        check(varlen([113, 203, 1, 0, 130], [203, 113, 1, 5, 0], heads=(4, 2), causal=True, tail=7, **kw))
        check(varlen([300, 64], heads=(3, 1), window=(70, 9), **kw), deterministic=True)
        check(dense(2, 145, 260, **kw))
        check(dense(1, 260, causal=True, **kw), deterministic=True)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 70), (70, 200), (129, 1), (1, 129)], ids=str)
@each_tile_size
def test_rows_without_keys(seqlen_q, seqlen_k, size):
    """1 and 24a: causal with more queries than keys, windows that leave rows empty."""
    with tiles(size):
        for mask in ({"causal": True}, {"causal": True, "window": (5, -1)}, {"window": (3, 0)}, {"window": (0, 0)}):
            check(dense(2, seqlen_q, seqlen_k, **mask))
            p = varlen([seqlen_q, 33], [seqlen_k, 40], heads=(4, 2), **mask)
            out, lse, dq, *_ = check(p, deterministic=True)
            empty = (exact(p, torch.float64)[0][1] == -torch.inf).all(0)
            assert (out[empty] == 0).all()
            assert (lse[:, empty] == -torch.inf).all()
            assert (dq[empty] == 0).all()


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [
        ([0, 4, 0], [3, 4, 2]),
        ([3, 4, 2], [0, 4, 0]),
        ([5, 0, 70], [5, 0, 70]),
        ([0, 0], [0, 0]),
        ([0, 0], [5, 3]),
        ([5, 3], [0, 0]),
        ([0], [5]),
        ([5], [0]),
        ([], []),
    ],
    ids=str,
)
def test_empty_sequences(q_lengths, k_lengths):
    """2: empty first, in the middle, last, all of them, no tokens at all."""
    for tail in (0, 9):
        for mask in ({}, {"causal": True}):
            for deterministic in (False, True):
                check(varlen(q_lengths, k_lengths, tail=tail, **mask), deterministic)


def test_empty_dense():
    """2, dense: no batch, no queries, no keys."""
    for b, seqlen_q, seqlen_k in ((0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)):
        p = dense(b, seqlen_q, seqlen_k)
        out, lse, dq, dk, dv = poisoned_run(p)
        assert (out.shape, lse.shape, dq.shape) == (p.q.shape, (b, 2, seqlen_q), p.q.shape)
        assert all((x == 0).all() for x in (out, dq, dk, dv))
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_tile_size
def test_lengths_around_tiles_with_large_values(dtype, size):
    """6: one token, tile - 1, tile, tile + 1, odd lengths, 1023 and 1024, with values times 5."""
    with tiles(size):
        for headdim, causal in ((64, True), (128, False)):
            kw = {"headdim": headdim, "dtype": dtype, "causal": causal}
            for n in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 193):
                check(varlen([n], gain=5.0, heads=(1, 1), **kw))
            check(varlen([113, 203], [203, 113], gain=5.0, **kw))
            check(varlen([1023, 1024], [1024, 1023], gain=2.0, heads=(1, 1), **kw))


def test_fp16_times_five_stays_finite():
    """20."""
    for headdim in NATIVE:
        p = dense(2, 200, headdim=headdim, dtype=torch.float16, gain=5.0)
        assert all(x.isfinite().all() for x in poisoned_run(p))


@each_tile_size
def test_windows(size):
    """11: S, S - 1, 0, -1 on each side, tensors and numpy integers; equal masks give equal bits."""
    S = 193
    with tiles(size):
        causal = check(varlen([S, 64, 90], causal=True), deterministic=True)
        full = check(varlen([S, 64, 90]), deterministic=True)
        for left in (S, S - 1, 64, 1, 0, -1):
            for right in (S, S - 1, 64, 1, 0, -1):
                check(varlen([S, 64, 90], window=(left, right)))
        for window in ((-1, 0), (S, 0), (10**6, 0), (np.int64(-1), torch.tensor(0))):
            assert_same_bits(poisoned_run(varlen([S, 64, 90], window=window), True), causal, f"window {window}")
        for window in ((S, S), (10**6, -1), (2**40, S), [-1, S]):
            assert_same_bits(poisoned_run(varlen([S, 64, 90], window=window), True), full, f"window {window}")


@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (7, 1), (64, 8)], ids=str)
@each_tile_size
def test_grouped_queries(heads, size):
    """13: dk and dv are summed in fp32 over the group: no further from float64 than without a group."""
    with tiles(size):
        for headdim in (64, 128, 256) if heads != (64, 8) else (128,):
            for causal in (True, False):
                check(varlen([130, 1, 77], [130, 9, 64], heads=heads, headdim=headdim, causal=causal))
        check(dense(1, 200, heads=heads, causal=True), deterministic=True)


def test_softmax_scale():
    for scale in (0.01, 1.0):
        check(dense(1, 150, scale=scale, causal=True, headdim=80))


# --- neighbours


@each_tile_size
@each_headdim
def test_neighbours_never_meet(headdim, size):
    """3 and 5: NaN and Inf in one sequence or past the last one leave the others as they were, bit for bit."""
    lengths, tail = [100, 65, 200, 1, 130], 150
    start, stop, end = 165, 365, sum(lengths)
    with tiles(size):
        for mask in ({"causal": True}, {"window": (40, 40)}):
            p = varlen(lengths, heads=(4, 2), headdim=headdim, tail=tail, **mask)
            clean = check(p, deterministic=True)
            for bad in (torch.nan, torch.inf):
                for x in (p.q, p.k, p.v, p.dout):
                    x[start:stop] = bad
                    x[end:] = -bad
                out, lse, *grads = poisoned_run(p, True)
                for part in (slice(0, start), slice(stop, end)):
                    got, want = (
                        [x[0][part], x[1][:, part], *(g[part] for g in x[2:])] for x in ((out, lse, *grads), clean)
                    )
                    assert_same_bits(got, want, f"beside {bad}, {p}")
                for x in (out, *grads):
                    assert (x[end:] == 0).all()
                assert (lse[:, end:] == -torch.inf).all()


@each_tile_size
@each_headdim
def test_dense_varlen_and_a_sequence_alone_agree_bit_for_bit(headdim, size):
    """21."""
    b, s = 3, 150
    with tiles(size):
        for causal in (True, False):
            p = dense(b, s, heads=(4, 2), headdim=headdim, causal=causal)
            flat = Problem(*(x.flatten(0, 1) for x in (p.q, p.k, p.v, p.dout)), [s] * b, [s] * b, causal)
            one = Problem(*(x[1] for x in (p.q, p.k, p.v, p.dout)), [s], [s], causal)
            out, lse, dq, dk, dv = check(p, deterministic=True)
            whole = [out.flatten(0, 1), lse.transpose(0, 1).flatten(1), *(x.flatten(0, 1) for x in (dq, dk, dv))]
            assert_same_bits(poisoned_run(flat, True), whole, "dense and varlen")
            assert_same_bits(poisoned_run(one, True), [out[1], lse[1], dq[1], dk[1], dv[1]], "alone and in a batch")
            loose, again = poisoned_run(flat), poisoned_run(p)  # dq's order is free: the others still agree
            assert_same_bits(loose[:2], whole[:2], "not deterministic")
            assert_same_bits(loose[3:], [x.flatten(0, 1) for x in again[3:]], "not deterministic")
            assert (loose[2] - whole[2]).abs().max() <= 2 * torch.finfo(loose[2].dtype).eps * whole[2].abs().max()


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [
        ([32, 64, 65, 200, 252, 1], None),
        ([512, 1, 0, 130, 3], None),  # as long as one thread block takes alone
        ([700, 20, 0, 513, 3, 40, 1], None),  # longer ones beside short ones
        ([40, 300, 700, 9], [500, 20, 10, 0]),
    ],
    ids=str,
)
@each_tile_size
def test_short_sequences(q_lengths, k_lengths, size):
    """Tiles for many sequences, short on average: right, and dk and dv bit for bit those of the other tiles."""
    many, heads = (32, (16, 8)) if ON_GPU else (6, (2, 1))  # 32 sequences of 8 kv heads count as many
    filler = [(5, 60, 33)[i % 3] for i in range(many - len(q_lengths))]
    q_lengths, k_lengths = [*q_lengths, *filler], [*(k_lengths or q_lengths), *filler]
    with tiles(size):
        for mask in ({}, {"causal": True}, {"window": (70, 20)}):
            check(varlen(q_lengths, k_lengths, heads=heads, headdim=128, tail=9, **mask))
            p = varlen(q_lengths, k_lengths, heads=heads[1:] * 2, headdim=128, tail=9, **mask)
            loose, ordered = check(p), check(p, deterministic=True)
            assert_same_bits([loose[i] for i in (0, 1, 3, 4)], [ordered[i] for i in (0, 1, 3, 4)], "not deterministic")
        check(dense(many, 70, heads=heads, headdim=128, causal=True))


def test_max_seqlen_plays_no_part():
    """9: too large and too small change no bit; FA2_CHECK=1 refuses the latter."""
    p = varlen([100, 300, 7], causal=True)
    plain = check(p, deterministic=True)
    for max_seqlen in (4096, 1 << 20, 8) if ON_GPU else (4096,):
        assert_same_bits(poisoned_run(p, True, max_seqlen=max_seqlen), plain, f"max_seqlen {max_seqlen}")
    padded = Problem(p.q, p.k, p.v, p.dout, [100, 300, 7, 0, 0, 0], [100, 300, 7, 0, 0, 0], True)
    assert_same_bits(poisoned_run(padded, True), plain, "with padded cu_seqlens")


def test_one_long_sequence_among_many_short():
    """25, the numbers: a sequence of 8192 (its rate: `test_kernels_running_gpu.py`), against the blocked reference."""
    n = 8192 if ON_GPU else 512
    lengths = [64] * 64 + [n] + [64] * 64
    p = varlen(lengths, heads=(2, 1), headdim=128, causal=True)
    got = poisoned_run(p, deterministic=True)
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, v = (x.double().requires_grad_() for x in (p.q, p.k, p.v))
    out, lse, _ = fa2.reference.flash_attn_varlen_func(q, k, v, cu, cu, n, n, causal=True, return_attn_probs=True)
    want = (out, lse, *torch.autograd.grad(out, (q, k, v), p.dout.double()))
    for name, g, w in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert (g - w).norm() / w.norm() < (1e-6 if name == "lse" else 7e-3), name


# --- layouts


def views_of(x: Tensor) -> list[tuple[str, Tensor]]:
    """The same numbers in the strides that callers have."""
    odd = torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)[1:].view_as(x).copy_(x)
    last = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    heads_first = x.transpose(-2, -3).contiguous().transpose(-2, -3)
    wide = torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    uneven = torch.cat([x, x[..., :4]], dim=-1)[..., : x.shape[-1]]  # a row stride that is no multiple of 16 bytes
    sliced = torch.stack([x, x], dim=-2).flatten(-3, -2)[..., ::2, :]
    rows = torch.cat([x, x], dim=-3).narrow(-3, x.shape[-3], x.shape[-3])
    named = {"odd offset": odd, "headdim first": last, "heads first": heads_first, "wide rows": wide}
    return list((named | {"uneven rows": uneven, "every second head": sliced, "later rows": rows}).items())


@pytest.mark.parametrize("headdim", [64, 80] if ON_GPU else [64])
def test_strides_change_no_bit(headdim):
    """7: q, k, v and dout transposed, sliced, at odd offsets; dout expanded."""
    for p in (
        varlen([100, 60], heads=(4, 2), headdim=headdim, causal=True),
        dense(2, 90, heads=(4, 2), headdim=headdim),
    ):
        plain = check(p, deterministic=True)
        for name in ("q", "k", "v", "dout"):
            original = getattr(p, name)
            for layout, view in views_of(original):
                assert torch.equal(view, original)
                setattr(p, name, view)
                assert_same_bits(poisoned_run(p, True), plain, f"{name} with {layout}")
            setattr(p, name, original)
        p.dout = torch.full((), 0.5, device=DEVICE, dtype=p.q.dtype).expand_as(p.q)
        expanded = check(p, deterministic=True)
        p.dout = p.dout.contiguous()
        assert_same_bits(poisoned_run(p, True), expanded, "dout expanded")


def test_packed_tensors():
    """7: views of one qkv, and of one kv, are taken as they are; the gradient is one tensor."""
    lengths = [100, 3, 150]
    cu = torch.tensor([0, 100, 103, 253], device=DEVICE, dtype=torch.int32)
    for headdim in (64, 128):
        qkv, dout = normal(253, 3, 4, headdim).requires_grad_(), normal(253, 4, headdim, seed=1)
        p = Problem(*(x.contiguous() for x in qkv.detach().unbind(1)), dout, lengths, lengths, True)
        out, _, *grads = check(p, deterministic=True)
        poison(DEVICE)
        packed = fa2.flash_attn_varlen_qkvpacked_func(qkv, cu, 150, causal=True, deterministic=True)
        (dqkv,) = torch.autograd.grad(packed, qkv, dout)
        assert_same_bits([packed, dqkv], [out, torch.stack(grads, dim=1)], "packed qkv")
        q, kv = qkv.detach()[:, 0].requires_grad_(), qkv.detach()[:, 1:].requires_grad_()
        packed = fa2.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 150, 150, causal=True, deterministic=True)
        dq, dkv = torch.autograd.grad(packed, (q, kv), dout)
        assert_same_bits([packed, dq, dkv], [out, grads[0], torch.stack(grads[1:], dim=1)], "packed kv")
        whole = fa2.flash_attn_qkvpacked_func(qkv[None, :100], causal=True)
        assert_same_bits([whole[0]], [out[:100]], "packed dense")


# --- size


def test_more_than_65535_heads_and_batches():
    """8: b = 8300 with one token, batch times heads over 65535; with one key out is v and dv is dout."""
    b, h = (8300, 16) if ON_GPU else (83, 2)
    p = dense(b, 1, heads=(h, h), headdim=64)
    flat = Problem(*(x.flatten(0, 1) for x in (p.q, p.k, p.v, p.dout)), [1] * b, [1] * b, True)
    for x in (p, flat):
        for deterministic in (False, True):
            out, lse, dq, dk, dv = poisoned_run(x, deterministic)
            assert torch.equal(out, x.v)
            assert torch.equal(dv, x.dout)
            scores = (x.q.double() * x.k.double()).sum(-1) / 8
            assert (lse - scores.transpose(-1, -2).reshape(lse.shape)).abs().max() < 1e-3
            assert dq.abs().max() < 1e-2
            assert dk.abs().max() < 1e-2
    s = 3
    wide = dense(1100 if ON_GPU else 4, s, heads=(64, 64) if ON_GPU else (2, 2), headdim=40, causal=True)
    got = poisoned_run(wide, True)
    for i in (0, wide.q.shape[0] - 1):
        part = Problem(*(x[i : i + 1] for x in (wide.q, wide.k, wide.v, wide.dout)), causal=True)
        found = ratios(part, [x[i : i + 1] for x in got])
        assert max(found.values()) <= 1, f"batch {i}: {found}"


@pytest.mark.skipif(not ON_GPU, reason="needs 60 GB")
def test_offsets_beyond_two_to_the_31():
    """8: every tensor, the fp32 accumulator too, has more than 2^31 elements; varlen, then dense."""
    if torch.cuda.get_device_properties(0).total_memory < 80e9:
        pytest.skip("needs 80 GB of GPU memory")
    n, s, H, D = 280, 1000, 64, 128
    assert n * s * H * D > 2**31
    torch.cuda.empty_cache()
    x = [torch.empty(n * s, H, D, device=DEVICE, dtype=torch.bfloat16).normal_() for _ in range(4)]
    p = Problem(*x, [s] * n, [s] * n, True)
    out, lse, dq, dk, dv = run(p)
    parts = {}
    for i in (0, 262, n - 1):  # 262: its first elements lie below 2^31, its last above
        rows = slice(i * s, (i + 1) * s)
        for heads in (slice(0, 2), slice(H - 2, H)):
            part = Problem(*(t[rows, heads] for t in x), [s], [s], True)
            found = ratios(part, [t[rows, heads] if t is not lse else lse[heads, rows] for t in (out, lse, dq, dk, dv)])
            assert max(found.values()) <= 1, f"sequence {i}: {found}"
        parts[i] = out[rows].clone(), dk[rows].clone()
    del out, lse, dq, dk, dv
    d_out, _, _, d_dk, _ = run(Problem(*(t.unflatten(0, (n, s)) for t in x), causal=True))
    for i, (want_out, want_dk) in parts.items():
        assert_same_bits([d_out[i]], [want_out], "dense")
        assert torch.equal(d_dk[i], want_dk)
    del d_out, d_dk, p, x, parts
    torch.cuda.empty_cache()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU's memory")
def test_strides_beyond_two_to_the_31():
    """8: few elements, far apart."""
    base = torch.zeros(2**31 + 2**22, device=DEVICE, dtype=torch.bfloat16)
    p = dense(2, 100, heads=(2, 2), headdim=64, causal=True)
    plain = check(p, deterministic=True)
    for name in ("q", "k", "v", "dout"):
        near = getattr(p, name)
        far = base.as_strided(near.shape, (2**31, *near.stride()[1:]))
        far.copy_(near)
        setattr(p, name, far)
        assert_same_bits(poisoned_run(p, True), plain, f"{name} far apart")
        setattr(p, name, near)
    q_rows = base.as_strided((100, 2, 64), (2**24, 64, 1))  # rows up to 99 * 2^24 < 2^31 apart, in bytes beyond it
    q_rows.copy_(p.q[0])
    one = Problem(q_rows, p.k[0], p.v[0], p.dout[0], [100], [100], True)
    assert_same_bits(poisoned_run(one, True)[:1], [plain[0][0]], "rows far apart")


# --- random problems


def test_random_problems_against_float64():
    """FA2_DRAWS random problems (the record has 2000: `python -m fa2.bench.correctness`)."""
    draws = int(os.environ.get("FA2_DRAWS", "300" if ON_GPU else "5"))
    record = differential(draws, seed=1, device=DEVICE)
    print({name: record[name] for name in ("draws", "seconds", "worst_over_bound")})
    assert not record["failures"], "\n".join(record["failures"][:10])
