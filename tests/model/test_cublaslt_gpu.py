"""Products with cuBLASLt's epilogues, against float64 and without a kernel beside the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model import cublaslt
from model.cublaslt import add_product, gelu_backward_product, linear, linear_gelu, product

pytestmark = pytest.mark.gpu
SHAPES = [(4096, 512, 2048), (1, 8, 16), (1000, 96, 384), (257, 40, 24), (33, 7, 9)]


@pytest.fixture(autouse=True)
def _serves() -> None:
    if reason := cublaslt.why_unavailable(torch.device("cuda"), torch.bfloat16):
        pytest.skip(reason)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The heuristic's first algorithm, also where torch's way is faster; untimed."""

    def first(self: Any, run: Callable[[int], object], apart: Callable[[], object]) -> int:
        self.best = 0
        return 0

    cublaslt._product.cache_clear()
    monkeypatch.setattr(cublaslt._Product, "choose", first)
    yield
    cublaslt._product.cache_clear()


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
    return (std * torch.randn(*shape, device="cuda")).to(dtype)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found.double() - expected).norm() <= 0.75 * torch.finfo(found.dtype).eps * expected.norm())


def check_all(T: int, k: int, m: int, dtype: torch.dtype) -> None:
    x, weight, bias, addend = normal(T, k, dtype=dtype), normal(m, k, dtype=dtype, std=k**-0.5), normal(m), normal(T, m)
    bias, addend = bias.to(dtype), addend.to(dtype)
    for b in (bias, None):
        up = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert close(linear(x, weight, b, addend), up + addend)
        assert close(linear(x, weight, b, None), up)
        y, kept = linear_gelu(x, weight, b)
        assert close(kept, up)
        # the library makes GELU of its sum before it rounds it, the steps apart of the rounded one
        assert (y.double() - F.gelu(up, approximate="tanh")).norm() <= 2 * torch.finfo(dtype).eps * up.norm()
    dy, up = normal(T, k, dtype=dtype), 2 * normal(T, m, dtype=dtype)
    assert close(product(dy, weight.t().contiguous()), dy.double() @ weight.double().t())
    before = normal(k, m).float()
    total = before.clone()
    if add_product(total, dy, up):
        expected = before.double() + dy.double().t() @ up.double()
        assert (total.double() - expected).norm() <= 1e-5 * expected.norm(), "the fp32 sum is not rounded to 16 bits"
    else:
        assert torch.equal(total, before)
    leaf = up.double().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(dy.double() @ weight.double().t())
    assert leaf.grad is not None
    found = gelu_backward_product(dy, weight.t().contiguous(), up)
    assert (found.double() - leaf.grad).norm() <= 1.5 * torch.finfo(dtype).eps * leaf.grad.norm()


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "k", "m"), SHAPES)
def test_equals_float64(T: int, k: int, m: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_all(T, k, m, dtype)


def test_what_is_faster_equals_float64() -> None:
    torch.manual_seed(0)
    for _ in range(2):  # timed, and as later
        check_all(2048, 256, 1024, torch.bfloat16)


@pytest.mark.usefixtures("fused")
def test_views_and_other_strides() -> None:
    torch.manual_seed(0)
    dy, weight, up = normal(64, 64), normal(64, 128), normal(64, 128)
    expected = gelu_backward_product(dy, weight, up)
    shifted = torch.empty(64 * 64 + 8, device="cuda", dtype=dy.dtype)[8:].view(64, 64).copy_(dy)  # 16 bytes further
    assert torch.equal(gelu_backward_product(shifted, weight, up), expected)
    assert torch.equal(gelu_backward_product(dy.t().contiguous().t(), weight.t().contiguous().t(), up), expected)
    bias = normal(65)[1:]
    expected = linear(dy, weight.t().contiguous(), None, up)
    assert torch.equal(linear(shifted, weight.t(), None, up.t().contiguous().t()), expected)
    assert torch.equal(linear(dy, dy, bias, dy), linear(dy, dy, bias.clone(), dy))


def test_no_tokens() -> None:
    assert gelu_backward_product(normal(0, 8), normal(8, 16), normal(0, 16)).shape == (0, 16)
    assert linear(normal(0, 8), normal(16, 8), None, normal(0, 16)).shape == (0, 16)
    assert [t.shape for t in linear_gelu(normal(0, 8), normal(16, 8), None)] == [(0, 16)] * 2


def calls() -> dict[str, Callable[[], Any]]:
    x, weight, bias, y = normal(2048, 512), normal(2048, 512), normal(2048), normal(2048, 2048)
    gradient = normal(2048, 512).float()
    return {
        "linear": lambda: linear(x, weight, bias, y),
        "product": lambda: product(y, weight),
        "add_product": lambda: add_product(gradient, y, x),
        "linear_gelu": lambda: linear_gelu(x, weight, bias),
        "gelu_backward_product": lambda: gelu_backward_product(y, weight, x),
    }


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ["linear", "product", "linear_gelu", "gelu_backward_product"])
def test_one_kernel(name: str) -> None:
    call = calls()[name]
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if "Memset" not in name]) == 1, names


def test_no_wait_after_the_first_call() -> None:
    ready = calls()
    for call in ready.values():
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in ready.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_may_hold_a_product_that_was_never_timed() -> None:
    x, weight, addend = normal(512, 64), normal(256, 64), normal(512, 256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, None, addend)
    graph.replay()
    assert close(out, F.linear(x.double(), weight.double()) + addend.double())


@pytest.mark.parametrize("way", ["torch's", "the library's"])
def test_timing_adds_nothing_to_the_gradient(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product that is chosen is added once, whichever it is, and torch's is left to the caller."""
    choose = cublaslt._Product.choose

    def chosen(self: Any, run: Callable[[int], object], apart: Callable[[], object]) -> int:
        choose(self, run, apart)
        return self.found if way == "torch's" else 0

    monkeypatch.setattr(cublaslt._Product, "choose", chosen)
    dy, x, total = normal(1024, 136), normal(1024, 72), torch.zeros(136, 72, device="cuda")
    for times in (1, 2):
        done = add_product(total, dy, x)
        assert done == (way != "torch's")
        expected = dy.double().t() @ x.double() * (times if done else 0)
        assert (total.double() - expected).norm() <= 1e-5 * expected.norm()


def test_what_cannot_be_added_to_in_place_is_left_to_torch() -> None:
    dy, x = normal(64, 32), normal(64, 16)
    for total in (torch.zeros(16, 32, device="cuda").t(), torch.zeros(32 * 16 + 8, device="cuda")[8:].view(32, 16)):
        assert not add_product(total, dy, x)
        assert not total.any()
    assert not add_product(torch.zeros(32, 16, device="cuda"), dy.t().contiguous().t(), x)
