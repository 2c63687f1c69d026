"""The operators: schemas, fake kernels, tracing, compilation and FLOP formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import fa2
from fa2 import checks, extension

OPS = torch.ops.fa2
LENGTHS = torch.tensor([0, 7, 7, 18], dtype=torch.int32)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(name: str, dtype: torch.dtype) -> tuple:
    shape = (20,) if "varlen" in name else (2, 10)
    # A view of a packed tensor and a transposed one: the fake kernels must not copy the inputs' strides.
    q = draw(*shape, 3, 4, 16, dtype=dtype).select(-3, 0)
    k, v = (draw(*shape[:-1], 2, shape[-1], 16, seed=i, dtype=dtype).transpose(-3, -2) for i in (1, 2))
    cu = (LENGTHS, LENGTHS, 11, 11) if "varlen" in name else ()
    mask = (0.25, -1, 0)
    if name.startswith("fwd"):
        return (q, k, v, *cu, *mask)
    out, lse = getattr(OPS, name.replace("bwd", "fwd"))(q, k, v, *cu, *mask)
    return (draw(*out.shape, seed=4, dtype=dtype), q, k, v, out, lse, *cu, *mask, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fwd", "fwd_varlen", "bwd", "bwd_varlen"])
def test_opcheck(name, dtype):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(OPS, name).default, arguments(name, dtype), test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fake_kernels_serve_a_gpu_that_is_not_there(dtype):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        for name in ("fwd", "bwd"):
            q, k = (torch.empty(2, 8, h, 64, device="cuda", dtype=dtype) for h in (4, 2))
            lse = torch.empty(2, 4, 8, device="cuda")
            mask = (0.125, -1, 0)
            if name == "fwd":
                out, lse = OPS.fwd(q, k, k, *mask)
                assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 8), torch.float32)
            else:
                dq, dk, _ = OPS.bwd(q, q, k, k, q, lse, *mask, False)
                assert (dq.shape, dk.shape, dk.dtype, dk.device.type) == (q.shape, k.shape, dtype, "cuda")


def test_meta_tensors_give_shapes():
    q, k = torch.empty(20, 4, 16, device="meta"), torch.empty(20, 2, 16, device="meta", requires_grad=True)
    cu = LENGTHS.to("meta")
    out, lse, _ = fa2.flash_attn_varlen_func(q, k, k, cu, cu, 11, 11, causal=True, return_attn_probs=True)
    assert (out.shape, lse.shape) == (q.shape, (4, 20))
    assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("layout", ["varlen", "dense", "shared"])
def test_compiles_into_one_graph(layout):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout == "varlen":
            return fa2.flash_attn_varlen_func(q, k, v, LENGTHS, LENGTHS, 11, 11, causal=True) * 2
        if layout == "shared":  # one tensor three times, and a headdim that is padded
            return fa2.flash_attn_func(q[None, ..., :12], q[None, ..., :12], q[None, ..., :12], window_size=(3, 3)) * 2
        return fa2.flash_attn_func(q[None], k[None], v[None], causal=True, deterministic=True) * 2

    x = [draw(20, h, 16, seed=h).requires_grad_() for h in (4, 2, 2)]
    wanted = x[:1] if layout == "shared" else x
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    eager, traced = attend(*x), compiled(*x)
    assert torch.equal(eager, traced)
    grads = [torch.autograd.grad(out.square().sum(), wanted) for out in (eager, traced)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_lengths_that_vary_are_traced_as_symbols():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q: fa2.flash_attn_func(q, q, q, causal=True) * 2, fullgraph=True, backend=counter)
    for b, s in ((2, 10), (3, 15), (4, 20), (7, 11)):
        compiled(draw(b, s, 2, 8).requires_grad_()).sum().backward()
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_look_up_of_a_kernel_is_a_constant_of_the_graph(monkeypatch, dynamic):
    asked = []

    @torch.compiler.assume_constant_result
    def kernel_problem(device: str, dtype: torch.dtype, headdim: int) -> str | None:
        asked.append((device, dtype, headdim))
        return None

    monkeypatch.setattr(extension, "kernel_problem", kernel_problem)
    monkeypatch.setattr(checks, "HOST_DEVICES", ())  # the CPU stands in for a GPU
    compiled = torch.compile(lambda q: fa2.flash_attn_func(q, q, q), fullgraph=True, backend="eager", dynamic=dynamic)
    q = draw(1, 9, 2, 80, dtype=torch.bfloat16)
    assert compiled(q).shape == q.shape
    assert asked == [("cpu", torch.bfloat16, 80)]
    compiled(q)
    assert len(asked) == 1, "nothing is looked up when the graph runs"


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_with_inductor():
    weight = draw(16, 3 * 16, seed=7).requires_grad_()

    def block(x: Tensor, cu: Tensor) -> Tensor:
        qkv = (x @ weight).view(-1, 3, 2, 8)
        return x + fa2.flash_attn_varlen_qkvpacked_func(qkv, cu, 11, causal=True).flatten(1)

    x = draw(20, 16)
    compiled = torch.compile(block, fullgraph=True)
    for cu in (LENGTHS, torch.tensor([0, 3, 9, 20], dtype=torch.int32)):
        eager, traced = block(x, cu), compiled(x, cu)
        torch.testing.assert_close(traced, eager)
        grads = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (eager, traced)]
        torch.testing.assert_close(*grads)


def test_flops_are_those_of_sdpa():
    q, k, v = (draw(2, 24, h, 16, seed=h).requires_grad_() for h in (4, 4, 4))
    with FlopCounterMode(display=False) as ours:
        fa2.flash_attn_func(q, k, v, causal=True).sum().backward()
    assert ours.get_total_flops() == 7 * 2 * 2 * 4 * 24 * 24 * 16
    with FlopCounterMode(display=False) as forward:
        fa2.flash_attn_func(q, k, v)
    assert forward.get_total_flops() == 2 * 2 * 2 * 4 * 24 * 24 * 16


def test_flops_of_varlen_count_the_true_lengths():
    q, k = draw(20, 4, 16).requires_grad_(), draw(20, 2, 16)
    with FlopCounterMode(display=False) as counter:
        fa2.flash_attn_varlen_func(q, k, k, LENGTHS, LENGTHS, 4096, 4096, causal=True).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 4 * 16 * (7 * 7 + 11 * 11)
