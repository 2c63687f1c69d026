"""How the CUDA kernels run: repeats, streams, graphs, compilation, autograd's corners, memory, synchronisation, errors.
What they compute: `test_kernels_gpu.py`."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fa2
from fa2 import extension
from fa2.bench.correctness import TILES, Problem, ratios, run, tiles

pytestmark = pytest.mark.gpu
OPS = torch.ops.fa2
NATIVE = (64, 80, 96, 128, 192, 256)  # one for each size of tile


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device="cuda", dtype=torch.int32)


def qkv(*shape: int, heads: tuple[int, int] = (4, 2), headdim: int = 64, dtype: torch.dtype = torch.bfloat16):
    """q, k, v that require gradients."""
    each = ((0, heads[0]), (1, heads[1]), (2, heads[1]))
    return [normal(*shape, h, headdim, dtype=dtype, seed=i).requires_grad_() for i, h in each]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(*(t.detach().contiguous().view(torch.int16) for t in pair)) for pair in pairs)


def milliseconds(call: Callable[[], object], runs: int = 15) -> float:
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    torch.cuda._sleep(2_000_000)  # the host gets ahead
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


# --- repeats


@pytest.mark.parametrize("size", TILES)
@pytest.mark.parametrize("headdim", NATIVE)
def test_repeats_are_equal(headdim, size):
    """14: 250 repeats at batch 60 give the same bits of out, lse, dk, dv; 50 deterministic ones under a busy second
    stream those of dq too, in dense and in varlen with groups."""
    side, a = torch.cuda.Stream(), normal(2048, 2048)
    dout, x = normal(60, 333, 2, headdim, seed=3), [t.detach() for t in qkv(60, 333, heads=(2, 2), headdim=headdim)]
    mask = (headdim**-0.5, -1, 0)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    with tiles(size):
        first: list[Tensor] = []
        for _ in range(250):
            out, lse = OPS.fwd(*x, *mask)
            _, dk, dv = OPS.bwd(dout, *x, out, lse, *mask, False)
            got = [t.view(torch.int16) for t in (out, lse, dk, dv)]
            first = first or got
            for g, f in zip(got, first, strict=True):
                different += (g != f).any()
        assert int(different) == 0
        lengths = [333, 40, 0, 1, 129, 700, 64]
        c, longest = cu(lengths), max(lengths)
        y = [t.detach() for t in qkv(sum(lengths), heads=(6, 2), headdim=headdim)]
        dout_y = normal(*y[0].shape, seed=3)
        first = []
        for i in range(50):
            with torch.cuda.stream(side):
                for _ in range(i % 3):
                    a @ a
            out, lse = OPS.fwd(*x, *mask)
            dense = OPS.bwd(dout, *x, out, lse, *mask, True)
            out, lse = OPS.fwd_varlen(*y, c, c, longest, longest, *mask)
            packed = OPS.bwd_varlen(dout_y, *y, out, lse, c, c, longest, longest, *mask, True)
            got = [t.view(torch.int16) for t in (*dense, *packed)]
            first = first or got
            for g, f in zip(got, first, strict=True):
                different += (g != f).any()
        assert int(different) == 0


# --- streams, devices, graphs


def test_another_stream():
    """15: the kernels follow the current stream, in the backward too."""
    x, dout = qkv(2, 700, heads=(8, 8), headdim=128), normal(2, 700, 8, 128, seed=3)
    zeros = [torch.zeros_like(t).requires_grad_() for t in x]
    want = fa2.flash_attn_func(*x, causal=True, deterministic=True)
    want = [want, *torch.autograd.grad(want, x, dout)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what runs elsewhere would see zeros
        with torch.no_grad():
            for z, t in zip(zeros, x, strict=True):
                z.copy_(t)
        out = fa2.flash_attn_func(*zeros, causal=True, deterministic=True)
        got = [out, *torch.autograd.grad(out, zeros, dout)]
    torch.cuda.current_stream().wait_stream(stream)
    assert same(got, want)


def test_two_devices():
    """15: a device that is not the current one; both in one process."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = qkv(2, 100)
    y = [t.detach().to("cuda:1").requires_grad_() for t in x]
    assert torch.cuda.current_device() == 0
    a, b = (fa2.flash_attn_func(*t, causal=True, deterministic=True) for t in (x, y))
    grads = [torch.autograd.grad(o, t, torch.ones_like(o)) for o, t in ((a, x), (b, y))]
    assert same([a, *grads[0]], [t.to("cuda:0") for t in (b, *grads[1])])


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_replay_with_other_lengths(deterministic):
    """16: forward and backward in one CUDA graph; the lengths are read at replay, counters start anew each time."""
    T, options = 700, {"causal": True, "deterministic": deterministic}
    x, dout = qkv(T), normal(T, 4, 64, seed=3)
    c = cu([100, 200, 300, 0])

    def step() -> list[Tensor]:
        out = fa2.flash_attn_varlen_func(*x, c, c, T, T, **options)
        return [out.detach(), *torch.autograd.grad(out, x, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([100, 200, 300, 0], [700, 0, 0, 0], [1, 1, 1, 600], [0, 0, 0, 0], [64, 128, 256, 252]):
        c.copy_(cu(lengths))
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        p = Problem(*(t.detach() for t in x), dout, lengths, lengths, True)
        got = [captured[0], run(p)[1], *captured[1:]]
        found = ratios(p, got)
        assert max(found.values()) <= 1, f"lengths {lengths}: {found}"
        if deterministic:
            assert same([captured[0], *captured[1:]], [t for i, t in enumerate(run(p, True)) if i != 1])


# --- torch.compile and the operators


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_into_one_graph():
    """16: dense and varlen, forward and backward, other lengths without compiling again."""
    x = qkv(300, headdim=80)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa2.flash_attn_func(q[None] * 1, k[None], v[None], causal=True, deterministic=True) * 2

    def packed(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return fa2.flash_attn_varlen_func(q * 1, k, v, c, c, 300, 300, causal=True, deterministic=True) * 2

    for call, calls in ((dense, [()]), (packed, [(cu([100, 200]),), (cu([250, 50]),)])):
        compiled = torch.compile(call, fullgraph=True)
        for more in calls:
            eager, traced = call(*x, *more), compiled(*x, *more)
            grads = [torch.autograd.grad(out, x, torch.ones_like(out)) for out in (eager, traced)]
            assert same([eager, *grads[0]], [traced, *grads[1]])


@pytest.mark.parametrize("name", ["fwd", "fwd_varlen", "bwd", "bwd_varlen"])
def test_opcheck(name):
    """16: schema, fake kernel and tracing, with views of packed and of transposed tensors."""
    shape = (70,) if "varlen" in name else (2, 35)
    q = normal(*shape, 3, 4, 64).select(-3, 0)
    k, v = (normal(*shape[:-1], 2, shape[-1], 64, seed=i).transpose(-3, -2) for i in (1, 2))
    c = cu([20, 0, 45])
    arguments = (q, k, v, *((c, c, 45, 45) if "varlen" in name else ()), 0.125, -1, 0)
    if name.startswith("bwd"):
        out, lse = getattr(OPS, name.replace("bwd", "fwd"))(*arguments)
        arguments = (normal(*out.shape, seed=4), q, k, v, out, lse, *arguments[3:], True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=checks)


# --- autograd


def test_only_some_inputs_need_gradients():
    """17."""
    q, k, v = qkv(2, 100)
    every = torch.autograd.grad(fa2.flash_attn_func(q, k, v, deterministic=True).sum(), (q, k, v))
    for wanted in ([0], [1], [2], [0, 2]):
        x = [t if i in wanted else t.detach() for i, t in enumerate((q, k, v))]
        some = torch.autograd.grad(fa2.flash_attn_func(*x, deterministic=True).sum(), [x[i] for i in wanted])
        assert same(list(some), [every[i] for i in wanted])
    plain = fa2.flash_attn_func(q, k, v)
    for region in (torch.no_grad(), torch.inference_mode()):
        with region:
            out = fa2.flash_attn_func(q, k, v)
            assert not out.requires_grad
            assert same([out], [plain.detach()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    """17."""
    x = qkv(150)
    c = cu([50, 100])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa2.flash_attn_varlen_func(q, k, v, c, c, 100, 100, causal=True, deterministic=True)

    plain = torch.autograd.grad(attend(*x).square().sum(), x)
    checkpoint(attend, *x, use_reentrant=reentrant).square().sum().backward()
    assert same([t.grad for t in x], list(plain))


def test_second_derivative_raises():
    """17."""
    q, k, v = qkv(1, 20)
    (grad,) = torch.autograd.grad(fa2.flash_attn_func(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_autocast():
    """18: fp32 inputs are cast, their gradients come back in fp32; mixed dtypes too."""
    x = qkv(2, 50, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        plain = fa2.flash_attn_func(*(t.to(dtype) for t in x), causal=True)
        with torch.autocast("cuda", dtype):
            out = fa2.flash_attn_func(*x, causal=True)
            mixed = fa2.flash_attn_func(x[0].to(torch.bfloat16), x[1], x[2], causal=True)
        assert out.dtype == mixed.dtype == dtype
        assert same([out], [plain])
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), x))


# --- memory and time


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("headdim", "heads"), [(128, (16, 16)), (64, (32, 4))], ids=str)
def test_peak_memory(headdim, heads, deterministic):
    """24: out, lse; gradients, one fp32 accumulator, O(T·H); linear in T. Nothing for a max_seqlen too large."""
    H, Hkv = heads
    peaks = []
    for T in (8192, 16384):
        x, dout, c = qkv(T, heads=heads, headdim=headdim), normal(T, H, headdim, seed=3), cu([T // 2, T // 2])
        fa2.flash_attn_varlen_func(*x, c, c, T // 2, T // 2, causal=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        big, kv, rows, slack = T * H * headdim, T * Hkv * headdim, T * H, 12 << 20
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = fa2.flash_attn_varlen_func(*x, c, c, 1 << 20, 1 << 20, causal=True, deterministic=deterministic)
        saved = torch.cuda.memory_allocated() - before
        assert torch.cuda.max_memory_allocated() - before <= 2 * big + 4 * rows + slack
        assert saved <= 2 * big + 4 * rows + slack / 2, "saved for the backward: out and lse beside the inputs"
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, x, dout)
        backward = torch.cuda.max_memory_allocated() - before - saved
        # dq, dk, dv; the accumulator; lse_log2, delta and (deterministic) counters, which are far below 4 bytes a row.
        assert backward <= 2 * (big + 2 * kv) + 4 * big + 3 * 4 * rows + slack
        peaks.append(saved + backward)
        del x, dout, out, grads
    assert peaks[1] <= 2.1 * peaks[0]


def test_nothing_synchronises():
    x, dout, c = qkv(300), normal(300, 4, 64, seed=3), cu([100, 200])
    dense = [t[None] for t in x]

    def step() -> None:
        out = fa2.flash_attn_varlen_func(*x, c, c, 200, 200, causal=True, deterministic=True)
        torch.autograd.grad(out, x, dout)
        torch.autograd.grad(fa2.flash_attn_func(*dense, window_size=(9, 3)), x, dout[None])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        # torch's own calls would have raised; the extension's would wait for this sleep.
        done = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)
        done.record()
        step()
        assert not done.query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_work_follows_the_true_lengths():
    """9 and 25: a max_seqlen far too large, padded cu_seqlens, one long sequence among many short.

    A grid sized by max_seqlen or by the batch would cost many times the work; a factor of 2 is far from both that and
    a timing's noise. How fast it is stands in the benchmark.
    """
    H, D, n = 16, 128, 16384
    mask = (D**-0.5, -1, 0)
    lengths = [64] * 128 + [n] + [64] * 128
    x = [t.detach() for t in qkv(sum(lengths), heads=(H, H), headdim=D)]
    c, padded, dout = cu(lengths), cu(lengths + [0] * 256), normal(*x[0].shape, seed=3)
    alone = [t[None, 8192 : 8192 + n] for t in x]

    def times(*lengths) -> tuple[float, float]:
        out, lse = OPS.fwd_varlen(*x, *lengths, *mask)
        forward = milliseconds(lambda: OPS.fwd_varlen(*x, *lengths, *mask))
        return forward, milliseconds(lambda: OPS.bwd_varlen(dout, *x, out, lse, *lengths, *mask, False), 8)

    plain = times(c, c, n, n)
    for other in (times(c, c, 1 << 24, 1 << 24), times(padded, padded, n, n)):
        assert other[0] <= 2 * plain[0]
        assert other[1] <= 2 * plain[1]
    out, lse = OPS.fwd(*alone, *mask)
    one = dout[None, 8192 : 8192 + n]
    dense = (
        milliseconds(lambda: OPS.fwd(*alone, *mask)),
        milliseconds(lambda: OPS.bwd(one, *alone, out, lse, *mask, False), 8),
    )
    work = 1 + 256 * 64**2 / n**2
    print(f"skewed over dense, forward {plain[0] / dense[0] / work:.2f}, backward {plain[1] / dense[1] / work:.2f}")
    assert plain[0] <= 2 * work * dense[0]
    assert plain[1] <= 2 * work * dense[1]


# --- what is refused


def call(**change) -> Tensor:
    x = {"q": normal(12, 4, 64), "k": normal(12, 2, 64), "v": normal(12, 2, 64)}
    lengths = {"cu_seqlens_q": cu([5, 7]), "cu_seqlens_k": cu([5, 7]), "max_seqlen_q": 7, "max_seqlen_k": 7}
    return fa2.flash_attn_varlen_func(**{**x, **lengths, **change})


BAD = {
    "fp32": (
        lambda: {n: normal(12, 2, 64, dtype=torch.float32) for n in "qkv"},
        r"q must be float16 or bfloat16 on a GPU \(float32 inputs are cast under torch.autocast\), got torch.float32",
    ),
    "fp64": (
        lambda: {n: normal(12, 2, 64, dtype=torch.float64) for n in "qkv"},
        "q must be float16 or bfloat16 on a GPU",
    ),
    "headdim": (lambda: {n: normal(12, 2, 264) for n in "qkv"}, "headdim must be at most 256, got 264"),
    "mixed dtypes": (lambda: {"k": normal(12, 2, 64, dtype=torch.float16)}, "k must be of q's dtype torch.bfloat16"),
    "k elsewhere": (lambda: {"k": normal(12, 2, 64).cpu()}, "k must be on q's device cuda:0, got cpu"),
    "heads": (lambda: {"q": normal(12, 3, 64)}, r"nheads_q must be a positive multiple of nheads_kv \(2\), got 3"),
    "int64": (lambda: {"cu_seqlens_q": cu([5, 7]).long()}, "cu_seqlens_q must be int32, got torch.int64"),
    "lengths elsewhere": (
        lambda: {"cu_seqlens_k": cu([5, 7]).cpu()},
        "cu_seqlens_k must be on q's device cuda:0, got cpu",
    ),
    "lengths strided": (lambda: {"cu_seqlens_q": cu([5, 0, 7, 0])[::2]}, "cu_seqlens_q must be contiguous"),
    "lengths' shape": (lambda: {"cu_seqlens_k": cu([12])}, r"cu_seqlens_k must be of cu_seqlens_q's shape \(3,\)"),
    "dropout": (lambda: {"dropout_p": 0.1}, "dropout_p must be 0.0"),
    "softcap": (lambda: {"softcap": 30.0}, "softcap must be 0.0"),
    "alibi": (lambda: {"alibi_slopes": torch.ones(4)}, "alibi_slopes must be None"),
    "pages": (lambda: {"block_table": torch.ones(1)}, "block_table must be None"),
    "scale": (lambda: {"softmax_scale": -1.0}, "softmax_scale must be"),
    "window": (lambda: {"window_size": (-2, 0)}, "window_size must be at least -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    """10, 18 and the issue's list: the sentence comes, and the next call works."""
    change, message = BAD[case]
    with pytest.raises((ValueError, RuntimeError), match=f"fa2: {message}"):
        call(**change())
    assert call().isfinite().all()


def test_values_are_checked_on_demand(monkeypatch):
    """9 and 10: without FA2_CHECK nothing is read back; with it wrong values are named."""
    monkeypatch.setenv("FA2_CHECK", "1")
    call()
    for change, message in (
        ({"cu_seqlens_q": cu([9, -2])}, "cu_seqlens_q must be non-decreasing, got 9 before 7 at index 2"),
        ({"cu_seqlens_k": cu([5, 8])}, r"cu_seqlens_k\[-1\] must be at most the number of tokens \(12\), got 13"),
        ({"cu_seqlens_q": cu([5, 7]) + 1}, r"cu_seqlens_q\[0\] must be 0, got 1"),
        ({"max_seqlen_q": 3}, r"max_seqlen_q must be at least the longest sequence \(7\), got 3"),
    ):
        with pytest.raises(ValueError, match=f"fa2: {message}"):
            call(**change)


def test_operators_name_what_would_read_outside():
    """The raw operators, past the public checks."""
    x = [t.detach() for t in qkv(12)]
    c, mask = cu([5, 7]), (0.125, -1, 0)
    with pytest.raises(RuntimeError, match="fa2: cu_seqlens_q must be int32, got Long"):
        OPS.fwd_varlen(*x, c.long(), c, 7, 7, *mask)
    with pytest.raises(RuntimeError, match="fa2: cu_seqlens_k must be on q's device"):
        OPS.fwd_varlen(*x, c, c.cpu(), 7, 7, *mask)
    with pytest.raises(RuntimeError, match="fa2: headdim must be a positive multiple of 8, got 60"):
        OPS.fwd_varlen(*(t[..., :60] for t in x), c, c, 7, 7, *mask)
    wide, listed = normal(12, 2, 264), r"fa2: no kernel for fwd, bfloat16, headdim 264 on sm_\d+; have sm\d+ float16"
    with pytest.raises(RuntimeError, match=listed):
        OPS.fwd_varlen(wide, wide, wide, c, c, 7, 7, *mask)
    with pytest.raises(RuntimeError, match="fa2: q must be float16 or bfloat16, got Float"):
        OPS.fwd(*(t.float()[None] for t in x), *mask)


def test_small_tiles_are_really_other_kernels():
    """The table has two sizes of each, and the limit on shared memory chooses: the small ones fit 99 KB."""
    rows = [row for row in fa2.kernels() if row.op in ("fwd", "bwd")]
    for op in ("fwd", "bwd"):
        for headdim in {row.max_headdim for row in rows if row.family == "sm80"}:
            sizes = {row.shared_bytes for row in rows if (row.op, row.max_headdim, row.family) == (op, headdim, "sm80")}
            assert min(sizes) <= 101376, (op, headdim)
    q = normal(1, 512, 2, 128)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as large:
        OPS.fwd(q, q, q, 0.1, -1, 0)
        torch.cuda.synchronize()
    with tiles("small"), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as small:
        OPS.fwd(q, q, q, 0.1, -1, 0)
        torch.cuda.synchronize()
    names = [{e.key for e in profile.key_averages() if "attention_fwd" in e.key} for profile in (large, small)]
    if all(names):  # a machine may lack the profiler's library
        assert names[0] != names[1], names


def test_the_family_can_be_chosen(monkeypatch):
    """FA2_ARCH=sm80 takes the other family's kernel on a GPU that has a newer one, and a wrong value is named."""
    q = normal(1, 512, 2, 128)
    names = []
    for size in ("newest", "large"):
        with tiles(size), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            OPS.fwd(q, q, q, 0.1, -1, 0)
            torch.cuda.synchronize()
        names.append([e.key for e in profile.key_averages() if "attention_fwd" in e.key])
    if all(names):  # a machine may lack the profiler's library
        assert all("sm80" in n for n in names[1]), names
        if torch.cuda.get_device_capability() == (9, 0):
            assert all("sm90" in n for n in names[0]), names
    monkeypatch.setenv("FA2_ARCH", "hopper")
    with pytest.raises(RuntimeError, match="fa2: FA2_ARCH must be sm80 or sm90, got hopper"):
        OPS.fwd(q, q, q, 0.1, -1, 0)


def test_a_call_waits_for_the_one_before():
    """A kernel may start while the one before it ends: a chain of calls without a gap equals one with waits."""
    c = torch.tensor([0, 700, 700, 1500, 2048], device="cuda", dtype=torch.int32)
    x = normal(1, 2048, 4, 128)

    def chain(wait: bool) -> Tensor:
        q = x
        for _ in range(30):
            dense, _ = OPS.fwd(q, q, q, 0.3, -1, 0)
            if wait:
                torch.cuda.synchronize()
            packed, _ = OPS.fwd_varlen(dense[0], dense[0], q[0], c, c, 800, 800, 0.3, -1, 0)
            if wait:
                torch.cuda.synchronize()
            q = packed[None]
        return q

    assert torch.equal(chain(False), chain(True))


NO_ROOM = """
import os, torch, fa2
os.environ["FA2_MAX_SHARED_BYTES"] = "1024"
q = torch.ones(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
try:
    fa2.flash_attn_func(q, q, q)
except RuntimeError as error:
    print(error)
del os.environ["FA2_MAX_SHARED_BYTES"]
assert (fa2.flash_attn_func(q, q, q) == 1).all()
"""


def test_a_gpu_with_too_little_shared_memory_is_named():
    """23: no kernel fits, so the table is listed; nothing is broken afterwards."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert "fa2: no kernel for fwd, bfloat16, headdim 64 on sm_" in done.stdout, done.stdout


def test_kernels_are_listed():
    assert {row.op for row in fa2.kernels()} == extension.CUDA_OPS
