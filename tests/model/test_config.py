"""Each rule of `GPTConfig` is refused by name, with what was given."""

from __future__ import annotations

import pytest

from model.config import GPTConfig, Mlp, Position

REFUSED = [
    ({"n_layer": 0}, "model.n_layer must be positive, got 0"),
    ({"vocab_multiple": 0}, "model.vocab_multiple must be positive, got 0"),
    ({"max_positions": -1}, "model.max_positions must be positive, got -1"),
    ({"d_model": 0}, "model.d_model must be positive, got 0"),
    ({"nheads_q": 0}, "model.nheads_q must be positive, got 0"),
    ({"loss_chunk_tokens": 0}, "model.loss_chunk_tokens must be positive, got 0"),
    ({"init_std": 0.0}, "model.init_std must be positive, got 0.0"),
    ({"norm_eps": 0.0}, "model.norm_eps must be positive, got 0.0"),
    ({"rope_theta": 0.0}, "model.rope_theta must be positive, got 0.0"),
    ({"vocab_size": 0}, "model.vocab_size must be positive or null, got 0"),
    ({"nheads_kv": 0}, "model.nheads_kv must be positive or null, got 0"),
    ({"d_ff": 0}, "model.d_ff must be positive or null, got 0"),
    ({"d_model": 100}, "model.d_model must be a multiple of model.nheads_q (6), got 100"),
    ({"nheads_kv": 4}, "model.nheads_kv must be a divisor of model.nheads_q (6), got 4"),
    (
        {"d_model": 30},
        "model.d_model must be such that headdim = d_model / nheads_q is even for rotary positions, got 30",
    ),
    ({"dropout": 1.0}, "model.dropout must be in [0, 1), got 1.0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[next(iter(v)) for v, _ in REFUSED])
def test_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.") as error:
        GPTConfig(**values)
    assert str(error.value) == message


def test_vocabulary_must_be_known_to_pad_it() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size must be set"):
        _ = GPTConfig().padded_vocab_size


def test_derived_sizes() -> None:
    config = GPTConfig(vocab_size=50257, d_model=768, nheads_q=12, nheads_kv=4)
    assert (config.headdim, config.kv_heads, config.ff_width, config.padded_vocab_size) == (64, 4, 3072, 50304)
    assert GPTConfig(d_model=768, nheads_q=12, mlp=Mlp.swiglu).ff_width == 2048
    assert GPTConfig(d_model=30, position=Position.learned).headdim == 5
