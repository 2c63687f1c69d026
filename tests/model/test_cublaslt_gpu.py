"""GELU's derivative in cuBLASLt's epilogue, against float64 and without a kernel of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model import cublaslt
from model.cublaslt import gelu_backward_product

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _serves() -> None:
    if reason := cublaslt.why_unavailable(torch.device("cuda"), torch.bfloat16):
        pytest.skip(reason)


def inputs(T: int, d: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    dy, up = (torch.randn(T, n, device="cuda").to(dtype) for n in (d, width))
    return dy, (torch.randn(d, width, device="cuda") * d**-0.5).to(dtype), 2 * up


def exact(dy: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    leaf = up.double().requires_grad_()
    torch.nn.functional.gelu(leaf, approximate="tanh").backward(dy.double() @ weight.double())
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("T", "d", "width"), [(4096, 512, 2048), (1, 8, 16), (1000, 96, 384), (257, 40, 24), (33, 7, 9)]
)
def test_equals_float64(T: int, d: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = inputs(T, d, width, dtype)
    expected = exact(*tensors)
    for _ in range(2):  # timed, and as later
        error = gelu_backward_product(*tensors).double() - expected
        assert error.norm() < 0.75 * torch.finfo(dtype).eps * expected.norm()


def test_views_and_other_strides() -> None:
    torch.manual_seed(0)
    dy, weight, up = inputs(64, 64, 128, torch.bfloat16)
    expected = gelu_backward_product(dy, weight, up)
    shifted = torch.empty(64 * 64 + 8, device="cuda", dtype=dy.dtype)[8:].view(64, 64).copy_(dy)  # 16 bytes further
    assert torch.equal(gelu_backward_product(shifted, weight, up), expected)
    assert torch.equal(gelu_backward_product(dy.t().contiguous().t(), weight.t().contiguous().t(), up), expected)


def test_no_tokens() -> None:
    assert gelu_backward_product(*inputs(0, 8, 16, torch.bfloat16)).shape == (0, 16)


def test_one_kernel_and_no_wait_after_the_first_call() -> None:
    tensors = inputs(2048, 512, 2048, torch.bfloat16)
    gelu_backward_product(*tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            gelu_backward_product(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if "Memset" not in name]) == 1, names
