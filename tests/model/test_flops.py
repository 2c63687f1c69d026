"""FLOPs are what torch's own counter counts; the measured matmul rate and the peak table behave."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model.attention import reference_attention
from model.config import GPTConfig, Mlp
from model.flops import (
    device_peak_tflops,
    exact_flops,
    gemm_shapes,
    matmul_params,
    paper_flops,
    sustained_matmul_flops,
)
from model.gpt import GPT

CONFIG = GPTConfig(vocab_size=128, n_layer=2, d_model=48, nheads_q=4, d_ff=80, loss_chunk_tokens=16)
SHAPES = [
    CONFIG,
    replace(CONFIG, mlp=Mlp.swiglu, nheads_kv=2, tie_embeddings=False),
    replace(CONFIG, nheads_kv=1, bias=False),
]
LENGTHS = (7, 20, 1, 12)


def free_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return q + (k + v).repeat_interleave(group, dim=1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Two matrix products a document, over all pairs: what the counter sees is not halved."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    parts = [[t.transpose(0, 1) for t in d] for d in zip(*(t.split(LENGTHS) for t in (q, k, v)), strict=True)]
    return torch.cat([(((q @ k.mT).softmax(-1)) @ v).transpose(0, 1) for q, k, v in parts])


def counted(config: GPTConfig, attention) -> int:  # type: ignore[no-untyped-def]
    model = GPT(config, attention)
    tokens = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in LENGTHS])
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens, positions, cu_seqlens, 64).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", SHAPES, ids=["gelu", "swiglu-gqa-untied", "mqa-nobias"])
def test_exact_flops_against_the_counter(config: GPTConfig) -> None:
    tokens, sum_len_sq = sum(LENGTHS), sum(n * n for n in LENGTHS)
    linear = counted(config, free_attention)
    assert linear == 6 * matmul_params(config) * tokens
    full_attention = counted(config, plain_attention) - linear
    assert full_attention == 12 * config.n_layer * config.d_model * sum_len_sq
    # of len² pairs the causal mask needs len (len + 1) / 2
    pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
    assert exact_flops(config, tokens, sum_len_sq) == linear + full_attention * pairs // sum_len_sq


def test_the_counter_knows_fa2s_operator() -> None:
    """Forward alone: the operators' backward is counted by torch's convention, which recomputes the scores."""
    config = replace(CONFIG, d_model=64)  # fa2 pads a headdim up to a multiple of 8: here 16
    model = GPT(config, reference_attention)
    tokens = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.loss(tokens, tokens, torch.zeros_like(tokens), cu_seqlens, 64)
    attention = 4 * config.n_layer * config.d_model * sum(n * n for n in LENGTHS)
    assert counter.get_total_flops() == 2 * model.matmul_params * len(tokens) + attention


@pytest.mark.parametrize("config", SHAPES)
def test_matmul_params_match_the_model(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(replace(config, vocab_size=100), free_attention)
    assert model.matmul_params == matmul_params(model.config)


def test_padding_the_vocabulary_is_not_needed_work() -> None:
    padded, exact = (replace(CONFIG, vocab_size=100, vocab_multiple=m) for m in (128, 1))
    assert exact_flops(padded, 10, 100) == exact_flops(exact, 10, 100)


def test_paper_flops_of_the_papers_table() -> None:
    """GPT3-1.3B at 2k: 6 N + 12 L d s a token."""
    assert paper_flops(1_300_000_000, 24, 2048, 8 * 2048, 8 * 2048**2) == 8 * 2048 * (
        6 * 1_300_000_000 + 12 * 24 * 2048 * 2048
    )


def test_the_vocabulary_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size must be set"):
        exact_flops(GPTConfig(), 1, 1)


def test_gemm_shapes() -> None:
    config = GPTConfig(n_layer=3, d_model=64, nheads_q=4, nheads_kv=2, d_ff=96, mlp=Mlp.swiglu)
    assert gemm_shapes(config, 10) == [(10, 128, 64, 3), (10, 64, 64, 3), (10, 192, 64, 3), (10, 64, 96, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sustained_rate_leaves_the_random_state_alone(dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    rate = sustained_matmul_flops(CONFIG, 256, "cpu", dtype, seconds=0.1)
    assert 1e6 < rate < 1e13
    assert torch.equal(torch.get_rng_state(), state)


def test_sustained_rate_times_what_it_claims(monkeypatch) -> None:
    """With a clock that ticks one second per product, the rate is FLOPs a product."""
    import model.flops as flops

    products = 0
    mm = torch.mm

    def counting_mm(a: Tensor, b: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return mm(a, b)

    monkeypatch.setattr(flops.time, "perf_counter", lambda: float(products))
    monkeypatch.setattr(flops.torch, "mm", counting_mm)
    rate = sustained_matmul_flops(CONFIG, 8, "cpu", torch.float32, seconds=500.0)
    per_round = sum(3 * 2 * m * n * k for m, n, k, _ in gemm_shapes(CONFIG, 8))
    assert rate == pytest.approx(per_round / 12)
    assert products >= 500, "sustained for the asked time"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA A10G", None),
    ],
)
def test_peak_table(name: str, peak: float | None) -> None:
    assert device_peak_tflops(name) == peak


@pytest.mark.gpu
def test_sustained_rate_on_cuda() -> None:
    config = GPTConfig(vocab_size=50257, n_layer=24, d_model=2048, nheads_q=16)
    state = torch.cuda.get_rng_state()
    rate = sustained_matmul_flops(config, 16384, "cuda", torch.bfloat16)
    peak = device_peak_tflops(torch.cuda.get_device_name())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert peak is None or 0.3 < rate / (peak * 1e12) < 1.0
