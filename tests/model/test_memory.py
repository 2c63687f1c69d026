"""The estimate against the sizes that torch really keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.attention import reference_attention
from model.config import GPTConfig, Mlp, Norm, Position
from model.gpt import GPT
from model.memory import memory_estimate

CONFIG = GPTConfig(vocab_size=500, n_layer=3, d_model=64, nheads_q=4, nheads_kv=2, loss_chunk_tokens=64)
SHAPES = [CONFIG, replace(CONFIG, mlp=Mlp.swiglu, norm=Norm.rmsnorm, bias=False), replace(CONFIG, dropout=0.1)]
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("position", list(Position))
def test_weights_gradients_and_optimiser_are_exact(precision: str, position: Position) -> None:
    config = replace(CONFIG, position=position, tie_embeddings=False)
    model = GPT(config, reference_attention).to(DTYPES[precision])
    estimate = memory_estimate(config, 256, precision, False, "torch")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser = torch.optim.AdamW(model.parameters())
    optimiser.step()
    moments = [s[key] for s in optimiser.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert estimate["weights"] == sum(p.nbytes for p in model.parameters())
    assert estimate["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert estimate["optimiser"] == sum(m.nbytes for m in moments)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("config", SHAPES, ids=["gelu", "swiglu-rmsnorm", "dropout"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_near_what_autograd_saves(precision: str, config: GPTConfig, checkpointing: bool) -> None:
    n_tokens = 512
    model = GPT(config, reference_attention, activation_checkpointing=checkpointing)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    tokens = torch.zeros(n_tokens, dtype=torch.int64)
    positions = torch.arange(n_tokens, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, n_tokens], dtype=torch.int32)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        model(tokens, positions, cu_seqlens, n_tokens)
    estimate = memory_estimate(config, n_tokens, precision, checkpointing, "torch")["activations"]
    if checkpointing:  # the hooks see the blocks' inputs; a block's recomputation is on top
        assert (
            sum(saved.values()) < estimate < memory_estimate(config, n_tokens, precision, False, "torch")["activations"]
        )
    else:
        assert estimate == pytest.approx(sum(saved.values()), rel=0.15)


def test_eager_keeps_every_blocks_probabilities() -> None:
    config, n_tokens, context = replace(CONFIG, nheads_kv=None), 512, 128
    without = memory_estimate(config, n_tokens, "bf16-mixed", False, "torch", context)["activations"]
    with_scores = memory_estimate(config, n_tokens, "bf16-mixed", False, "eager", context)["activations"]
    pairs = n_tokens // context * context**2
    assert with_scores - without == (config.n_layer + 2) * config.nheads_q * pairs * 2
    recomputed = memory_estimate(config, n_tokens, "bf16-mixed", True, "eager", context)["activations"]
    assert recomputed < with_scores


def test_parts() -> None:
    plain = memory_estimate(CONFIG, 1024, "bf16-mixed", False, "torch")
    assert list(plain) == ["weights", "gradients", "optimiser", "activations", "logits"]
    assert all(isinstance(v, int) and v > 0 for v in plain.values())
    assert memory_estimate(CONFIG, 1024, "bf16-mixed", True, "torch")["activations"] < plain["activations"]
    assert memory_estimate(CONFIG, 1024, "bf16-mixed", False, "reference")["activations"] > plain["activations"]
    assert memory_estimate(CONFIG, 2048, "bf16-mixed", False, "torch")["logits"] == plain["logits"]


def test_unknown_precision() -> None:
    with pytest.raises(ValueError, match=r"precision must be one of .*bf16-mixed.*, got 'fp8'"):
        memory_estimate(CONFIG, 1, "fp8", False, "torch")
