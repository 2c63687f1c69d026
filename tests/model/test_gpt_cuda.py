"""The GPT on a GPU: torch's attention, compiled blocks, no synchronisation inside a step, memory as foretold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fa2
from model.attention import AttentionFn, fa2_attention, reference_attention, torch_attention
from model.config import GPTConfig, Mlp, Norm, Position
from model.gpt import GPT
from model.linear import WeightCopies
from model.memory import memory_estimate
from tests.model.accumulate import accumulate

pytestmark = pytest.mark.gpu

GPT3_STYLE = GPTConfig(1000, max_positions=512, n_layer=4, d_model=256, nheads_q=4, position=Position.learned)
LLAMA_STYLE = GPTConfig(
    1000,
    max_positions=512,
    n_layer=4,
    d_model=256,
    nheads_q=4,
    nheads_kv=2,
    norm=Norm.rmsnorm,
    mlp=Mlp.swiglu,
    bias=False,
)
Batch = tuple[Tensor, Tensor, Tensor, Tensor, int]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(config: GPTConfig, attention: AttentionFn) -> GPT:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return GPT(config, attention)


def batch(lengths: tuple[int, ...], n_tokens: int = 2048, max_docs: int = 16, vocab: int = 1000) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(vocab, (n_tokens + 1,), generator=generator)
    limits = [0, *itertools.accumulate(lengths)]
    targets = ids[1:].clone()
    targets[limits[-1] :] = -100
    positions = torch.cat([torch.arange(n) for n in (*lengths, n_tokens - limits[-1])]).int()
    cu_seqlens = torch.tensor(limits + [limits[-1]] * (max_docs + 1 - len(limits)), dtype=torch.int32)
    return ids[:-1].cuda(), targets.cuda(), positions.cuda(), cu_seqlens.cuda(), 512


def step(model: GPT, inputs: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model.loss(*inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], expected[0], rtol=2e-3, atol=0)
    assert ours[1].keys() == expected[1].keys()
    for name, gradient in ours[1].items():
        # the keys' bias has gradient 0 but for rounding: judged by the size of the whole vector
        assert (gradient - expected[1][name]).norm() < 0.05 * expected[1][name].norm(), name


@pytest.mark.parametrize("config", [GPT3_STYLE, LLAMA_STYLE], ids=["gpt3", "llama"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_torch_backend_equals_the_eager_reference(config: GPTConfig, checkpointing: bool) -> None:
    inputs = batch((500, 1, 37, 512, 300, 129, 513 - 1))
    expected = step(build(config, reference_attention), inputs)
    model = build(config, torch_attention)
    model.activation_checkpointing = checkpointing
    assert_close(step(model, inputs), expected)
    for block in model.blocks:
        block.compile(fullgraph=True)
    assert_close(step(model, inputs), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ((512, 512, 512, 512), (7,), (100,) * 16):
            step(model, batch(lengths))


@pytest.mark.parametrize("backend", [torch_attention, fa2_attention])
@pytest.mark.parametrize("config", [GPT3_STYLE, LLAMA_STYLE], ids=["gpt3", "llama"])
@pytest.mark.parametrize("copied", [False, True])
def test_every_part_compiled_equals_the_eager_reference(config: GPTConfig, copied: bool, backend: AttentionFn) -> None:
    """Two micro-batches, so that gradients accumulate; with copies of the weights and without."""
    if backend is fa2_attention and fa2.why_unavailable(torch.device("cuda"), torch.bfloat16, config.headdim):
        pytest.skip("fa2 is not built here")
    micro_batches = [batch((500, 1, 37, 512, 300, 129, 513 - 1)), batch((512, 512, 512, 512))]

    def accumulated(model: GPT) -> tuple[Tensor, dict[str, Tensor]]:
        losses, gradients = accumulate(model, micro_batches, "cuda")
        return torch.stack(losses).sum(), gradients

    expected = accumulated(build(config, reference_attention))
    model = build(config, backend)
    copies = WeightCopies(model, torch.bfloat16) if copied else None
    model.compile()
    assert_close(accumulated(model), expected)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            if copies is None:
                model.zero_grad()
            else:
                copies.refresh()
                copies.zero_gradients()
            again = accumulated(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(again, expected)


@pytest.mark.parametrize("config", [GPT3_STYLE, LLAMA_STYLE], ids=["gpt3", "llama"])
def test_a_step_never_synchronises(config: GPTConfig) -> None:
    model = build(config, torch_attention)
    inputs = batch((500, 500))
    for block in model.blocks:
        block.compile(fullgraph=True)
    step(model, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_memory_is_near_the_estimate(checkpointing: bool) -> None:
    config = GPTConfig(16384, max_positions=512, n_layer=8, d_model=1024, nheads_q=8)
    model = build(config, torch_attention)
    model.activation_checkpointing = checkpointing
    inputs = batch((512,) * 32, n_tokens=16384, max_docs=32, vocab=16384)
    optimiser = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(*inputs)
        loss.backward()
        optimiser.step()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    estimate = memory_estimate(config, 16384, "bf16-mixed", checkpointing, "torch")
    assert peak == pytest.approx(sum(estimate.values()), rel=0.25)
