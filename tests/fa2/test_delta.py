"""The first CUDA kernel, delta = rowsum(dout * out), against float64. Builds the extension if need be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fa2
from fa2 import extension

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    extension.load(torch.cuda.current_device())


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def exact(dout: Tensor, out: Tensor) -> Tensor:
    return (dout.double() * out.double()).sum(-1).transpose(-1, -2)


def check(got: Tensor, dout: Tensor, out: Tensor) -> None:
    want = exact(dout, out)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert got.is_contiguous()
    # Each of at most 256 products is exact in fp32 or nearly so; the sum's error grows with the terms' magnitude.
    grain = 32 * torch.finfo(torch.float32).eps * exact(dout.abs(), out.abs())
    assert ((got.double() - want).abs() <= grain + 1e-30).all()


def poison(*shape: int) -> None:
    """Leave NaN in the memory that the allocator hands out next for this shape."""
    torch.full(shape, torch.nan, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("headdim", [8, 40, 64, 72, 80, 128, 136, 192, 256])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 1000])
def test_agrees_with_float64(dtype, headdim, rows):
    dout, out = draw(2, rows, 3, headdim, dtype=dtype), draw(2, rows, 3, headdim, seed=1, dtype=dtype)
    poison(2, 3, rows)
    check(torch.ops.fa2.delta(dout, out), dout, out)
    cu = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    poison(3, rows)
    varlen = torch.ops.fa2.delta_varlen(dout[0], out[0], cu)
    check(varlen, dout[0], out[0])
    assert torch.equal(varlen, torch.ops.fa2.delta(dout, out)[0])


def test_past_the_end_is_zero_whatever_lies_there():
    dout, out = draw(700, 4, 64), draw(700, 4, 64, seed=1)
    cu = torch.tensor([0, 5, 5, 333, 333], device="cuda", dtype=torch.int32)
    dout[333:], out[333:] = torch.nan, torch.inf
    poison(4, 700)
    got = torch.ops.fa2.delta_varlen(dout, out, cu)
    assert (got[:, 333:] == 0).all()
    check(got[:, :333].contiguous(), dout[:333], out[:333])
    nothing = torch.ops.fa2.delta_varlen(dout, out, torch.zeros(1, device="cuda", dtype=torch.int32))
    assert (nothing == 0).all()


@pytest.mark.parametrize("headdim", [64, 80])
def test_strides(headdim):
    qkv = draw(100, 3, 4, headdim)
    cu = torch.tensor([0, 100], device="cuda", dtype=torch.int32)
    plain = qkv[:, 1].contiguous()
    want = torch.ops.fa2.delta_varlen(plain, plain, cu)
    check(want, plain, plain)
    odd_base = torch.empty(plain.numel() + 1, device="cuda", dtype=plain.dtype)[1:].view_as(plain).copy_(plain)
    heads_first = plain.transpose(0, 1).contiguous().transpose(0, 1)
    dim_first = plain.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    wide = torch.cat([plain, plain.new_zeros(100, 4, 4)], dim=-1)[..., :headdim]  # row stride no multiple of 8
    for view in (qkv[:, 1], odd_base, heads_first, dim_first, wide):
        assert torch.equal(torch.ops.fa2.delta_varlen(view, plain, cu), want)
        assert torch.equal(torch.ops.fa2.delta_varlen(plain, view, cu), want)
    expanded = torch.ones((), device="cuda", dtype=plain.dtype).expand_as(plain)
    check(torch.ops.fa2.delta_varlen(expanded, plain, cu), expanded, plain)
    check(torch.ops.fa2.delta(expanded[None], plain[None]), expanded[None], plain[None])


def test_offsets_beyond_two_to_the_31():
    base = torch.zeros(2**31 + 2**20, device="cuda", dtype=torch.bfloat16)
    far = base.as_strided((2, 4, 64), (2**31, 64, 1))
    near = draw(2, 4, 64)
    far.copy_(near)
    cu = torch.tensor([0, 2], device="cuda", dtype=torch.int32)
    check(torch.ops.fa2.delta_varlen(far, near, cu), near, near)
    batch = base.as_strided((2, 1, 4, 64), (2**31, 256, 64, 1))
    check(torch.ops.fa2.delta(near[:, None], batch), near[:, None], near[:, None])


@pytest.mark.parametrize("shape", [(8300, 1, 16, 64), (3, 0, 4, 64), (0, 5, 4, 64), (1, 300_000, 1, 8)], ids=str)
def test_extreme_shapes(shape):
    x, y = draw(*shape), draw(*shape, seed=1)
    check(torch.ops.fa2.delta(x, y), x, y)


def test_stream_and_graph():
    dout, out = draw(512, 4, 64), draw(512, 4, 64, seed=1)
    cu = torch.tensor([0, 300], device="cuda", dtype=torch.int32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        dout.mul_(2)
        late = torch.ops.fa2.delta_varlen(dout, out, cu)
    torch.cuda.current_stream().wait_stream(stream)
    check(late[:, :300].contiguous(), dout[:300], out[:300])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.fa2.delta_varlen(dout, out, cu)
    cu.copy_(torch.tensor([0, 400]))
    dout.neg_()
    graph.replay()
    check(captured[:, :400].contiguous(), dout[:400], out[:400])
    assert (captured[:, 400:] == 0).all()


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = draw(1, 64, 2, 64).to("cuda:1")
    assert torch.cuda.current_device() == 0
    check(torch.ops.fa2.delta(x, x), x, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"headdim": 264},
            "fa2: no kernel for delta, bfloat16, headdim 264 on sm_[0-9]+; have sm80 float16 headdim <= 64",
        ),
        ({"headdim": 12}, "fa2: headdim must be a positive multiple of 8, got 12"),
        ({"dtype": torch.float32}, "fa2: out must be float16 or bfloat16, got Float"),
        ({"cu": torch.int64}, "fa2: cu_seqlens_q must be int32, got Long"),
        ({"device": "cpu"}, "fa2: cu_seqlens_q must be on out's device"),
        ({"rows": 9}, r"fa2: dout must be of out's shape \(10, 2, 64\), got \(9, 2, 64\)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_named(change, message):
    headdim, dtype = change.get("headdim", 64), change.get("dtype", torch.bfloat16)
    x = draw(10, 2, headdim, dtype=dtype)
    cu = torch.tensor([0, 10], device=change.get("device", "cuda"), dtype=change.get("cu", torch.int32))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fa2.delta_varlen(x[: change.get("rows", 10)], x, cu)


def test_kernels_are_listed():
    assert {row.op for row in fa2.kernels()} == extension.CUDA_OPS
