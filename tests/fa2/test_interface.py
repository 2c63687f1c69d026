"""The six public functions on a CPU: against the reference, and the cases that broke other attention kernels."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fa2
from fa2 import reference


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def qkv_of(T: int, heads: tuple[int, int] = (4, 2), headdim: int = 32, dtype: torch.dtype = torch.float32):
    shapes = ((T, heads[0], headdim), (T, heads[1], headdim), (T, heads[1], headdim))
    return [draw(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def varlen(q, k, v, lengths, k_lengths=None, **options):
    cu_q, cu_k = cu(lengths), cu(k_lengths or lengths)
    longest_q, longest_k = max(lengths, default=0), max(k_lengths or lengths, default=0)
    return fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest_q, longest_k, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (True, (9, -1)), (False, (5, 2))], ids=str
)
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (9, 3), (7, 1)], ids=str)
def test_agrees_with_the_reference(dtype, causal, window, heads):
    lengths, k_lengths = [1, 70, 0, 33, 5], [1, 70, 8, 50, 2]
    shapes = ((sum(lengths), heads[0], 24), (sum(k_lengths), heads[1], 24), (sum(k_lengths), heads[1], 24))
    x = [draw(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]
    exact = [t.detach().double().requires_grad_() for t in x]
    out, lse, _ = varlen(*x, lengths, k_lengths, causal=causal, window_size=window, return_attn_probs=True)
    want, want_lse, _ = reference.flash_attn_varlen_func(
        *exact, cu(lengths), cu(k_lengths), 70, 70, causal=causal, window_size=window, return_attn_probs=True
    )
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not lse.requires_grad
    dout = draw(*out.shape, seed=9, dtype=dtype)
    got = (out, *torch.autograd.grad(out, x, dout))
    wanted = (want, *torch.autograd.grad(want, exact, dout.double()))
    for g, w in zip(got, wanted, strict=True):
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
        assert (g.double() - w).abs().max() <= tolerance * w.abs().max()
    finite = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse.double() - want_lse)[finite].abs().max() < 1e-3


def test_the_reference_has_the_same_signatures():
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        assert inspect.signature(getattr(reference, name)) == inspect.signature(getattr(fa2, name))


def test_packed_twins():
    lengths = cu([5, 9, 2])
    qkv = draw(16, 3, 4, 16).requires_grad_()
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(1))
    plain = fa2.flash_attn_varlen_func(q, k, v, lengths, lengths, 9, 9, causal=True)
    grads = torch.autograd.grad(plain.square().sum(), (q, k, v))
    packed = fa2.flash_attn_varlen_qkvpacked_func(qkv, lengths, 9, causal=True)
    assert torch.equal(packed, plain)
    (dqkv,) = torch.autograd.grad(packed.square().sum(), qkv)
    assert torch.equal(dqkv, torch.stack(grads, dim=1))
    kv = qkv[:, 1:]
    assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(qkv[:, 0], kv, lengths, lengths, 9, 9, causal=True), plain)
    dense = fa2.flash_attn_func(q[None], k[None], v[None], causal=True)
    assert torch.equal(fa2.flash_attn_qkvpacked_func(qkv[None], causal=True), dense)
    assert torch.equal(fa2.flash_attn_kvpacked_func(qkv[None, :, 0], kv[None], causal=True), dense)


def test_dense_is_varlen_of_equal_lengths_and_a_batch_is_its_sequences():
    x = qkv_of(3 * 40)
    whole = varlen(*x, [40] * 3, causal=True, return_attn_probs=True)
    dense = fa2.flash_attn_func(*(t.unflatten(0, (3, 40)) for t in x), causal=True, return_attn_probs=True)
    assert torch.equal(dense[0].flatten(0, 1), whole[0])
    assert torch.equal(dense[1].transpose(0, 1).flatten(1), whole[1])
    grads = torch.autograd.grad(whole[0].square().sum(), x)
    alone = [t[40:80].detach().requires_grad_() for t in x]
    one = varlen(*alone, [40], causal=True)
    assert torch.equal(one, whole[0][40:80])
    for a, g in zip(torch.autograd.grad(one.square().sum(), alone), grads, strict=True):
        assert torch.equal(a, g[40:80])


@pytest.mark.parametrize("window", [(-1, -1), (6, 3)])
def test_nan_stays_in_its_sequence_and_past_the_end_everything_is_zero(window):
    lengths, T = [11, 7, 20], 45
    clean = qkv_of(T)
    dirty = [t.detach().clone() for t in clean]
    for t in dirty:
        t[11:18] = torch.nan
        t[38:] = torch.nan
    dirty = [t.requires_grad_() for t in dirty]
    dout = draw(T, 4, 32, seed=5)
    dirty_dout = dout.clone()
    dirty_dout[38:] = torch.nan
    dirty_dout[11:18] = torch.inf
    results = []
    for x, g in ((clean, dout), (dirty, dirty_dout)):
        out, lse, _ = varlen(*x, lengths, window_size=window, return_attn_probs=True)
        results.append((out, lse.T, *torch.autograd.grad(out, x, g)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[:11], b[:11])
        assert torch.equal(a[18:38], b[18:38])
    out, lse, *grads = results[1]
    assert (lse[38:] == -torch.inf).all()
    for t in (out, *grads):
        assert (t[38:] == 0).all()


def test_rows_without_keys():
    x = [draw(*s, seed=i).requires_grad_() for i, s in enumerate([(9, 2, 16), (4, 2, 16), (4, 2, 16)])]
    out, lse, _ = varlen(*x, [9], [4], causal=True, return_attn_probs=True)
    assert (out[:5] == 0).all()
    assert (lse[:, :5] == -torch.inf).all()
    assert lse[:, 5:].isfinite().all()
    dout = torch.ones_like(out)
    dout[:5] = torch.nan
    dq, dk, dv = torch.autograd.grad(out, x, dout)
    assert (dq[:5] == 0).all()
    assert all(t.isfinite().all() for t in (dq, dk, dv))


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [([0, 4, 0], [3, 4, 2]), ([3, 4, 2], [0, 4, 0]), ([0, 0], [0, 0]), ([0], [5]), ([5], [0]), ([], [])],
    ids=str,
)
def test_empty_sequences(q_lengths, k_lengths):
    x = [
        draw(n, 2, 16, seed=i).requires_grad_() for i, n in enumerate((sum(q_lengths), sum(k_lengths), sum(k_lengths)))
    ]
    cu_q, cu_k = cu(q_lengths), cu(k_lengths)
    out, lse, _ = fa2.flash_attn_varlen_func(*x, cu_q, cu_k, 5, 5, causal=True, return_attn_probs=True)
    assert out.shape == x[0].shape
    assert lse.shape == (2, sum(q_lengths))
    for g, t in zip(torch.autograd.grad(out.sum(), x), x, strict=True):
        assert g.shape == t.shape
        assert g.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_empty_dense(shape):
    q = draw(*shape, 2, 16).requires_grad_()
    out = fa2.flash_attn_func(q, q, q)
    assert out.shape == q.shape
    out.sum().backward()
    k = draw(shape[0], 0, 2, 16)
    assert (fa2.flash_attn_func(draw(shape[0], 3, 2, 16), k, k) == 0).all()


def test_padded_cu_seqlens_and_large_max_seqlen_change_nothing():
    x = qkv_of(40)
    plain = varlen(*x, [10, 25], causal=True)
    padded = fa2.flash_attn_varlen_func(*x, *[cu([10, 25, 0, 0, 0])] * 2, 4096, 4096, causal=True)
    assert torch.equal(plain, padded)


def test_windows_that_mean_the_same_are_the_same_bits():
    x = qkv_of(48)
    causal = varlen(*x, [48], causal=True)
    for window in [(-1, 0), (48, 0), (100, 0), (np.int64(-1), torch.tensor(0))]:
        assert torch.equal(varlen(*x, [48], window_size=window), causal)
    full = varlen(*x, [48])
    for window in [(48, 48), (1000, -1), [-1, 1000]]:
        assert torch.equal(varlen(*x, [48], window_size=window), full)
    torch.testing.assert_close(varlen(*x, [48], window_size=(47, 47)), full)
    assert not torch.equal(varlen(*x, [48], window_size=(46, 47)), full)


@pytest.mark.parametrize("headdim", [59, 111, 1, 40, 80])
def test_headdims_that_are_no_multiple_of_eight(headdim):
    x = [t.double().detach().requires_grad_() for t in qkv_of(20, headdim=headdim)]
    out = varlen(*x, [20], causal=True)
    want = reference.flash_attn_varlen_func(*x, cu([20]), cu([20]), 20, 20, causal=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), x) for o in (out, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 129])
def test_lengths_around_tiles_with_large_values(n):
    x = [(5 * t).detach().half().requires_grad_() for t in qkv_of(n)]
    out = varlen(*x, [n], causal=True)
    exact = reference.flash_attn_varlen_func(*(t.double() for t in x), cu([n]), cu([n]), n, n, causal=True)
    assert (out.double() - exact).abs().max() <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), x))


def test_strides_of_inputs_and_gradient_do_not_matter():
    x = qkv_of(30)
    plain = varlen(*x, [12, 18], causal=True)
    strided = [t.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for t in x]
    assert strided[0].stride(-1) != 1
    out = varlen(*strided, [12, 18], causal=True)
    assert torch.equal(out, plain)
    expanded = torch.ones(()).expand_as(out)
    transposed = torch.ones(32, 4, 30).permute(2, 1, 0)
    grads = [torch.autograd.grad(plain, x, torch.ones_like(plain), retain_graph=True)]
    grads += [torch.autograd.grad(out, strided, g, retain_graph=True) for g in (expanded, transposed)]
    for g in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(g, grads[0], strict=True))


def test_bits_repeat():
    x = qkv_of(300)

    def run() -> list[Tensor]:
        out = varlen(*x, [130, 100, 70], causal=True, deterministic=True)
        return [out, *torch.autograd.grad(out.square().sum(), x)]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_many_short_sequences():
    q = draw(700, 1, 2, 8)
    torch.testing.assert_close(fa2.flash_attn_func(q, q, q), q)


def test_only_some_inputs_need_gradients():
    q, k, v = qkv_of(10)
    both = torch.autograd.grad(varlen(q, k, v, [10]).sum(), (q, v))
    some = torch.autograd.grad(varlen(q, k.detach(), v, [10]).sum(), (q, v))
    assert all(torch.equal(a, b) for a, b in zip(both, some, strict=True))
    with torch.no_grad():
        assert not varlen(q, k, v, [10]).requires_grad
    with torch.inference_mode():
        varlen(q, k, v, [10])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    x = qkv_of(20)
    plain = torch.autograd.grad(varlen(*x, [9, 11], causal=True).square().sum(), x)
    again = checkpoint(lambda *t: varlen(*t, [9, 11], causal=True), *x, use_reentrant=reentrant)
    for t in x:
        t.grad = None
    again.square().sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(x, plain, strict=True))


def test_second_derivative_raises():
    q, k, v = qkv_of(6)
    (grad,) = torch.autograd.grad(varlen(q, k, v, [6]).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_derivatives_of_other_kinds_raise():
    q, k, v = (x.detach() for x in qkv_of(6))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        varlen(forward_ad.make_dual(q, torch.ones_like(q)), k, v, [6])
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda q: varlen(q, k, v, [6]).sum())(q)


def test_autocast_casts_and_the_gradient_comes_back_in_fp32():
    x = qkv_of(20)
    with torch.autocast("cpu", torch.bfloat16):
        out = varlen(*x, [20], causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, varlen(*(t.bfloat16() for t in x), [20], causal=True))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), x))


def test_softmax_scale():
    x = qkv_of(20)
    want = varlen(x[0] * 2, x[1], x[2], [20])
    torch.testing.assert_close(varlen(*x, [20], softmax_scale=2 * 32**-0.5), want)


# --- bad input


def call(**change):
    T = 12
    arguments = {
        "q": draw(T, 4, 16),
        "k": draw(T, 2, 16),
        "v": draw(T, 2, 16),
        "cu_seqlens_q": cu([5, 7]),
        "cu_seqlens_k": cu([5, 7]),
        "max_seqlen_q": 7,
        "max_seqlen_k": 7,
    }
    return fa2.flash_attn_varlen_func(**{**arguments, **change})


BAD = [
    (
        {"q": torch.zeros(12, 4, 16, dtype=torch.int32)},
        "q must be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    ({"k": draw(12, 2, 16, dtype=torch.float16)}, "k must be of q's dtype torch.float32, got torch.float16"),
    ({"v": draw(12, 2, 16).to("meta")}, "v must be on q's device cpu, got meta"),
    ({"q": draw(12, 3, 16)}, r"nheads_q must be a positive multiple of nheads_kv \(2\), got 3"),
    ({"q": draw(1, 12, 4, 16)}, r"q must be of shape \(total_tokens, nheads, headdim\), got \(1, 12, 4, 16\)"),
    ({"k": draw(12, 2, 8), "v": draw(12, 2, 8)}, "k must be of q's headdim 16, got 8"),
    ({"v": draw(11, 2, 16)}, r"v must be of k's shape \(12, 2, 16\), got \(11, 2, 16\)"),
    ({"cu_seqlens_q": cu([5, 7]).long()}, "cu_seqlens_q must be int32, got torch.int64"),
    ({"cu_seqlens_k": cu([5, 7]).to("meta")}, "cu_seqlens_k must be on q's device cpu, got meta"),
    ({"cu_seqlens_q": cu([5, 7])[None]}, r"cu_seqlens_q must be of shape \(batch \+ 1,\), got \(1, 3\)"),
    ({"cu_seqlens_k": cu([12])}, r"cu_seqlens_k must be of cu_seqlens_q's shape \(3,\), got \(2,\)"),
    ({"cu_seqlens_q": cu([5, 0, 7, 0])[::2]}, r"cu_seqlens_q must be contiguous, got stride \(2,\)"),
    ({"cu_seqlens_q": cu([9, -2, 5])[:3]}, "cu_seqlens_q must be non-decreasing, got 9 before 7 at index 2"),
    ({"cu_seqlens_k": cu([5, 8])}, r"cu_seqlens_k\[-1\] must be at most the number of tokens \(12\), got 13"),
    ({"cu_seqlens_q": cu([5, 7]) + 1}, r"cu_seqlens_q\[0\] must be 0, got 1"),
    ({"max_seqlen_q": -1}, "max_seqlen_q must be at least 0, got -1"),
    ({"dropout_p": 0.1}, "dropout_p must be 0.0 .*, got 0.1"),
    ({"softcap": 30.0}, "softcap must be 0.0 .*, got 30.0"),
    ({"alibi_slopes": torch.ones(4)}, "alibi_slopes must be None .*, got Tensor"),
    ({"block_table": torch.ones(1, 1)}, "block_table must be None .*, got Tensor"),
    ({"window_size": (1.5, 0)}, r"window_size must be two integers \(left, right\), got \(1.5, 0\)"),
    ({"window_size": 3}, r"window_size must be two integers \(left, right\), got 3"),
    ({"window_size": (-2, 0)}, r"window_size must be at least -1 .*, got \(-2, 0\)"),
    ({"q": None}, "q must be a tensor, got NoneType"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=f"^fa2: {message}$"):
        call(**change)


def test_good_input_is_taken():
    assert call().shape == (12, 4, 16)
    assert call(max_seqlen_q=torch.tensor(7), max_seqlen_k=torch.tensor(7)).shape == (12, 4, 16)


def test_bad_dense_and_packed_input_is_named():
    q = draw(2, 5, 4, 16)
    with pytest.raises(ValueError, match="fa2: k must be of q's batch 2, got 1"):
        fa2.flash_attn_func(q, q[:1], q[:1])
    with pytest.raises(ValueError, match=r"fa2: dropout_p must be 0\.0"):
        fa2.flash_attn_func(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match=r"fa2: qkv must be of shape \(batch, seqlen, 3, nheads, headdim\)"):
        fa2.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"fa2: kv must be of shape \(total, 2, nheads_kv, headdim\)"):
        fa2.flash_attn_varlen_kvpacked_func(q[0], q[0][:, None], cu([5]), cu([5]), 5, 5)


def test_values_are_checked_on_demand(monkeypatch):
    call(max_seqlen_q=3)
    monkeypatch.setenv("FA2_CHECK", "0")
    call(max_seqlen_q=3)
    monkeypatch.setenv("FA2_CHECK", "1")
    call()
    with pytest.raises(ValueError, match=r"fa2: max_seqlen_q must be at least the longest sequence \(7\), got 3"):
        call(max_seqlen_q=3)
    with pytest.raises(ValueError, match=r"fa2: max_seqlen_k must be at least the longest sequence \(7\), got 6"):
        call(max_seqlen_k=6)


# --- availability


def test_a_cpu_has_no_cuda_kernels():
    assert not fa2.is_available("cpu", torch.bfloat16, 64)
    assert "need a CUDA device, got 'cpu'" in fa2.why_unavailable(torch.device("cpu"), torch.bfloat16, 64)


@pytest.mark.parametrize(
    ("dtype", "headdim", "reason"),
    [
        (torch.float32, 64, "need float16 or bfloat16, got torch.float32"),
        (torch.float16, 264, "need a headdim of at most 256, got 264"),
    ],
)
def test_why_unavailable_says_what_is_missing(dtype, headdim, reason):
    assert reason in fa2.why_unavailable("cuda", dtype, headdim)
    assert fa2.is_available("cuda", dtype, headdim) is False


@pytest.mark.parametrize(("capability", "told"), [((7, 5), "got 7.5"), ((6, 1), "got 6.1")])
def test_an_old_gpu_is_named(monkeypatch, capability, told):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = fa2.why_unavailable("cuda:0", torch.bfloat16, 64)
    assert reason == f"the GPU must be of compute capability 8.0 or later, {told}"


def test_a_gpu_without_library_and_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fa2.extension, "find_library", lambda architectures: None)
    monkeypatch.setattr(fa2.extension.nvcc, "find_nvcc", lambda: None)
    reason = fa2.why_unavailable("cuda:0", torch.bfloat16, 64)
    assert "the CUDA extension is not built and cannot be built here: nvcc was not found" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_cuda_tensors_get_a_named_error_not_a_fallback():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 5, 2, 64, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="fa2: torch sees no CUDA device"):
            fa2.flash_attn_func(q, q, q)
        with pytest.raises(ValueError, match=r"fa2: q must be float16 or bfloat16 on a GPU .* got torch.float32"):
            fa2.flash_attn_func(q.float(), q.float(), q.float())
        wide = torch.empty(1, 5, 2, 264, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="fa2: headdim must be at most 256, got 264"):
            fa2.flash_attn_func(wide, wide, wide)
