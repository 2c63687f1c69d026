"""Names become backends, refusals say what to do, and torch's backend is clean where it is undefined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import model.attention as attention
from model.attention import eager_attention, reference_attention, resolve_attention, torch_attention

CPU = torch.device("cpu")


def quiet(_: str) -> None:
    raise AssertionError("only auto says something")


def test_reference_serves_anything() -> None:
    name, backend = resolve_attention("reference", CPU, torch.float64, 5, say=quiet)
    assert (name, backend) == ("reference", reference_attention)


def test_auto_falls_to_the_reference_on_a_cpu_and_says_so_once() -> None:
    said: list[str] = []
    name, backend = resolve_attention("auto", CPU, torch.float32, 64, say=said.append)
    assert (name, backend) == ("reference", reference_attention)
    assert len(said) == 1
    assert said[0].startswith("attention: auto takes reference (fa2: ")
    assert "torch: needs a CUDA device, got cpu" in said[0]


@pytest.mark.parametrize(
    ("fa2_lacks", "torch_lacks", "taken"),
    [(None, None, "fa2"), ("no kernel", None, "torch"), ("no kernel", "no GPU", "reference")],
)
def test_auto_prefers_fa2_then_torch(monkeypatch, fa2_lacks: str | None, torch_lacks: str | None, taken: str) -> None:
    monkeypatch.setattr(attention.fa2, "why_unavailable", lambda *_: fa2_lacks)
    monkeypatch.setattr(attention, "why_torch_unavailable", lambda *_: torch_lacks)
    said: list[str] = []
    name, backend = resolve_attention("auto", CPU, torch.bfloat16, 64, say=said.append)
    assert (name, backend) == (taken, attention.BACKENDS[taken])
    assert f"auto takes {taken}" in said[0]
    assert all(reason in said[0] for reason in (fa2_lacks, torch_lacks) if reason)


@pytest.mark.parametrize("name", ["fa2", "torch"])
def test_a_named_backend_that_cannot_serve_is_refused_with_advice(name: str) -> None:
    with pytest.raises(ValueError, match=f"^attention={name} cannot run here: .*CUDA device.*; set attention=auto"):
        resolve_attention(name, CPU, torch.bfloat16, 64, say=quiet)


def test_fa2s_own_sentence_is_passed_on(monkeypatch) -> None:
    monkeypatch.setattr(attention.fa2, "why_unavailable", lambda *_: "the moon is not right")
    with pytest.raises(ValueError, match="the moon is not right"):
        resolve_attention("fa2", CPU, torch.bfloat16, 64)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"attention must be one of auto, fa2, torch, .*, got 'flash'"):
        resolve_attention("flash", CPU, torch.float32, 64)


@pytest.mark.parametrize("name", sorted(attention.DENSE_BACKENDS))
def test_dense_backends_need_documents_of_one_length(name: str) -> None:
    with pytest.raises(ValueError, match=f"attention={name} takes documents of one length only.*attention=fa2"):
        resolve_attention(name, CPU, torch.float32, 64, say=quiet)


def test_cudnn_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="attention=sdpa_cudnn cannot run here: needs a CUDA device"):
        resolve_attention("sdpa_cudnn", CPU, torch.bfloat16, 64, say=quiet, one_length=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["eager", "sdpa_flash"])
def test_dense_backends_against_the_reference(name: str, compiled: bool) -> None:
    _, backend = resolve_attention(name, CPU, torch.float32, 8, say=quiet, one_length=True)
    attend = torch.compile(backend, backend="aot_eager", fullgraph=True) if compiled else backend
    packed = torch.randn(12, 3 * 2, 8, generator=torch.Generator().manual_seed(0))  # 3 documents of 4 tokens, 2 heads
    cu_seqlens = torch.tensor([0, 4, 8, 12, 12], dtype=torch.int32)
    results = []
    for function in (attend, reference_attention):
        x = packed.clone().requires_grad_()
        out = function(*x.split(2, dim=1), cu_seqlens, 4)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1])


def test_dense_backends_take_views() -> None:
    x = torch.randn(12, 6, 8)
    q = attention._heads_first(x[:, :2], 4)
    assert q.shape == (3, 2, 4, 8)
    assert q.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    out = torch.empty(3, 4, 2, 8).transpose(1, 2)  # as FlashAttention returns it
    assert attention._tokens_first(out).data_ptr() == out.data_ptr()


def test_eagers_probabilities_stay_in_the_dtype_of_its_inputs_under_autocast() -> None:
    q = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert {x.dtype for x in attention._eager(q, q, q)} == {torch.bfloat16}


def test_eager_is_an_operator_by_the_book() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    torch.library.opcheck(attention._eager, (q, q, q))


@pytest.mark.parametrize(
    ("dtype", "headdim", "rule"),
    [
        (torch.float32, 64, "bfloat16 or float16, got torch.float32"),
        (torch.bfloat16, 60, "multiple of 8, at most 256, got 60"),
        (torch.bfloat16, 264, "multiple of 8, at most 256, got 264"),
    ],
)
def test_what_torch_cannot_do(monkeypatch, dtype: torch.dtype, headdim: int, rule: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert attention.why_torch_unavailable(torch.device("cuda"), torch.bfloat16, 64) is None
    assert rule in (attention.why_torch_unavailable(torch.device("cuda"), dtype, headdim) or "")


def test_torch_needs_ampere(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "8.0" in (attention.why_torch_unavailable(torch.device("cuda"), torch.float16, 64) or "")


def test_rows_that_a_backend_leaves_undefined_become_zero(monkeypatch) -> None:
    """The wrapper of torch's backend, around a double that fills padding rows with NaN in both directions."""

    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor, real: int) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.real = real
            out = q + k + v
            out[real:] = torch.nan
            return out

        @staticmethod
        def backward(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
            assert dout[ctx.real :].abs().max() == 0
            grad = dout.clone()
            grad[ctx.real :] = torch.nan
            return grad, grad, grad, None

    def double(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: object):
        assert options["window_size"] == (-1, 0)
        return Undefined.apply(q, k, v, int(cu_q[-1]))

    monkeypatch.setattr(attention, "varlen_attn", double)
    q, k, v = torch.randn(3, 8, 2, 4).unbind()
    q[5:] = torch.nan
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = torch_attention(*inputs, torch.tensor([0, 2, 5, 5], dtype=torch.int32), 8)
    assert torch.equal(out[:5], (q + k + v)[:5])
    assert out[5:].abs().max() == 0
    dout = torch.ones_like(out)
    dout[5:] = torch.nan
    for gradient in torch.autograd.grad(out, inputs, dout):
        assert torch.equal(gradient, torch.cat((torch.ones(5, 2, 4), torch.zeros(3, 2, 4))))


def qkv(dtype: torch.dtype, nheads_kv: int) -> tuple[list[Tensor], Tensor, int]:
    generator = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(300, 8 + 2 * nheads_kv, 64, generator=generator, device="cuda", dtype=dtype)
    cu_seqlens = torch.tensor([0, 100, 101, 230, 290, 290, 290], dtype=torch.int32, device="cuda")
    return [t.detach().requires_grad_() for t in packed.split((8, nheads_kv, nheads_kv), dim=1)], cu_seqlens, 290


@pytest.mark.gpu
@pytest.mark.parametrize("nheads_kv", [8, 2])
def test_torch_backend_against_the_reference(nheads_kv: int) -> None:
    inputs, cu_seqlens, real = qkv(torch.bfloat16, nheads_kv)
    with torch.no_grad():
        for t in inputs:
            t[real:] = torch.nan
    exact = [t.detach().double().requires_grad_() for t in inputs]
    dout = torch.randn_like(inputs[0])
    dout[real:] = torch.nan
    torch.full((1 << 26,), torch.nan, device="cuda")  # what uninitialised memory will hold
    outs = [f(*x, cu_seqlens, 256) for f, x in ((torch_attention, inputs), (reference_attention, exact))]
    grads = [torch.autograd.grad(o, x, dout.to(o.dtype)) for o, x in zip(outs, (inputs, exact), strict=True)]
    for ours, reference in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        assert ours[real:].abs().max() == 0
        assert (ours - reference).norm() < 0.01 * reference.norm()


def test_eager_makes_no_gradient_for_its_probabilities() -> None:
    """Zeros as large as all the scores, which nobody reads."""
    made: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    q = torch.randn(16, 2, 8, requires_grad=True)
    out = eager_attention(q, q, q, torch.tensor([0, 16], dtype=torch.int32), 16)
    with Watch():
        out.sum().backward()
    assert any("eager_attention_backward" in name for name in made)
    assert not [name for name in made if "zeros" in name]
