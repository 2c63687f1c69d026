"""`fa2.reference` against autograd through the definition of attention, written once more, naively, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fa2 import reference

MASKS = [
    pytest.param(False, (-1, -1), id="full"),
    pytest.param(True, (-1, -1), id="causal"),
    pytest.param(True, (5, -1), id="causal-left5"),
    pytest.param(False, (3, 4), id="window3-4"),
    pytest.param(False, (0, 0), id="window0-0"),
    pytest.param(False, (-1, 2), id="right2"),
]


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """One sequence, (M, Hq, D) and (N, Hkv, D): the whole score matrix; autograd does the backward."""
    M, N, groups = len(q), len(k), q.shape[1] // k.shape[1]
    left, right = window[0], 0 if causal else window[1]
    seen = torch.zeros(M, N, dtype=torch.bool)
    for i in range(M):
        for j in range(N):
            at = i + N - M
            seen[i, j] = (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    some = seen.any(dim=-1)
    # Rows that see nothing never enter the softmax, so autograd has no 0/0 to differentiate.
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], M), -torch.inf, dtype=q.dtype)
    if bool(some.any()):
        kept = scores[:, some].masked_fill(~seen[some], -torch.inf)
        out = out.index_put((some,), torch.einsum("hmn,nhd->mhd", kept.softmax(dim=-1), v))
        lse[:, some] = kept.logsumexp(dim=-1).detach()
    return out, lse


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)], ids=str)
def test_varlen_agrees_with_autograd_through_the_definition(causal, window, heads):
    q_lengths, k_lengths = [5, 0, 9, 1, 12, 3], [5, 3, 4, 1, 20, 0]
    T_q, T_k = sum(q_lengths) + 3, sum(k_lengths) + 2
    q, k, v = draw(T_q, heads[0], 8), draw(T_k, heads[1], 8, seed=1), draw(T_k, heads[1], 8, seed=2)
    cu_q, cu_k = cu(q_lengths), cu(k_lengths)
    out, lse, _ = reference.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 99, 99, causal=causal, window_size=window, return_attn_probs=True
    )
    assert out.dtype == lse.dtype == torch.float64

    wanted, wanted_lse = [], []
    for i in range(len(q_lengths)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        o, le = naive(q[rows], k[keys], v[keys], causal, window)
        wanted.append(o)
        wanted_lse.append(le)
    expected = torch.cat([*wanted, torch.zeros(3, heads[0], 8)])
    expected_lse = torch.cat([*wanted_lse, torch.full((heads[0], 3), -torch.inf)], dim=1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)
    dout = draw(*out.shape, seed=3).detach()
    got = torch.autograd.grad(out, (q, k, v), dout)
    want = torch.autograd.grad(expected, (q, k, v), dout)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_dense_agrees_with_autograd_through_the_definition(causal, window):
    q, k, v = draw(2, 9, 4, 8), draw(2, 6, 2, 8, seed=1), draw(2, 6, 2, 8, seed=2)
    out, lse, none = reference.flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    assert none is None
    assert lse.shape == (2, 4, 9)
    # flash_attn's rule: a bound of seqlen_k or more is unbounded.
    expected = torch.stack([naive(q[i], k[i], v[i], causal, window)[0] for i in range(2)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    dout = draw(*out.shape, seed=3).detach()
    for g, w in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout), strict=True
    ):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-12)


def test_blocks_of_queries_change_nothing(monkeypatch):
    q, k, v = draw(50, 4, 8), draw(70, 2, 8, seed=1), draw(70, 2, 8, seed=2)

    def run() -> list[Tensor]:
        out = reference.flash_attn_func(q[None], k[None], v[None], causal=True, window_size=(30, -1))
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    whole = run()
    monkeypatch.setattr(reference, "_MAX_BLOCK_SCORES", 7 * 70 * 4)
    for a, b in zip(whole, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_no_score_matrix_of_a_long_document():
    T = 8192
    q = draw(T, 1, 8, dtype=torch.float32)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return result

    with Watch():
        out = reference.flash_attn_varlen_func(q, q, q, cu([T]), cu([T]), T, T, causal=True, window_size=(100, 0))
        out.sum().backward()
        assert largest < T * T / 30, "a window must cost its width"
        reference.flash_attn_varlen_func(q, q, q, cu([T]), cu([T]), T, T, causal=True)
    assert largest <= reference._MAX_BLOCK_SCORES < T * T


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computes_in_fp32_and_returns_the_input_dtype(dtype):
    q, k, v = (draw(1, 33, 2, 16, seed=i, dtype=dtype).detach().requires_grad_() for i in range(3))
    exact = reference.flash_attn_func(q.double(), k.double(), v.double(), causal=True)
    out, lse, _ = reference.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    # fp32 inside: of a 16-bit result only the final rounding is seen. Of an fp32 one the sums' own roundings are, whose
    # order depends on the CPU: two grains, seen 1.004 on one and less than 1 on another.
    grain = torch.finfo(dtype).eps * exact.abs().max() * (2 if dtype == torch.float32 else 1)
    assert (out.double() - exact).abs().max() <= grain
    assert all(g.dtype == dtype for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_second_derivative_raises():
    q = draw(1, 4, 1, 8)
    (grad,) = torch.autograd.grad(reference.flash_attn_func(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_gradcheck():
    q, k, v = draw(7, 2, 3), draw(7, 1, 3, seed=1), draw(7, 1, 3, seed=2)
    lengths = cu([3, 4])
    assert torch.autograd.gradcheck(
        lambda *x: reference.flash_attn_varlen_func(*x, lengths, lengths, 4, 4, causal=True), (q, k, v)
    )


@pytest.mark.gpu
def test_on_a_gpu_as_on_a_cpu():
    q, k, v = draw(40, 4, 16), draw(40, 2, 16, seed=1), draw(40, 2, 16, seed=2)
    lengths = cu([13, 0, 20])
    results = []
    for device in ("cpu", "cuda"):
        x = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        c = lengths.to(device)
        out = reference.flash_attn_varlen_func(*x, c, c, 20, 20, causal=True)
        results.append([t.cpu() for t in (out, *torch.autograd.grad(out.square().sum(), x))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
