"""Sampling: the cache changes nothing, draws obey their options, limits are respected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.attention import reference_attention
from model.config import GPTConfig, Mlp, Norm, Position
from model.generate import Decoder, draw, generate
from model.gpt import GPT

TINY = GPTConfig(vocab_size=61, max_positions=32, n_layer=2, d_model=24, nheads_q=4, d_ff=40, init_std=0.2)
PROMPT = torch.tensor([5, 17, 3])


def build(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(TINY, **changes), reference_attention).double()


def recomputed(model: GPT, ids: Tensor) -> Tensor:
    n = len(ids)
    hidden = model(ids, torch.arange(n, dtype=torch.int32), torch.tensor([0, n], dtype=torch.int32), n)
    return model.logits(hidden)[-1]


@pytest.mark.parametrize("position", list(Position))
@pytest.mark.parametrize("nheads_kv", [None, 2])
@torch.no_grad()
def test_cache_equals_full_recomputation(position: Position, nheads_kv: int | None) -> None:
    model = build(position=position, nheads_kv=nheads_kv, norm=Norm.rmsnorm, mlp=Mlp.swiglu)
    ids = torch.randint(61, (20,), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(model)
    scores = [decoder.read(ids[:6]), *(decoder.read(ids[i : i + 1]) for i in range(6, 20))]
    for end, row in zip(range(6, 21), scores, strict=True):
        torch.testing.assert_close(row, recomputed(model, ids[:end]), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_greedy_takes_the_likeliest_every_time() -> None:
    model = build()
    ids = PROMPT
    for _ in range(8):
        ids = torch.cat((ids, recomputed(model, ids).argmax()[None]))
    assert torch.equal(generate(model, PROMPT, 8, temperature=0), ids[3:])


def test_same_generator_same_text() -> None:
    model = build()
    runs = [generate(model, PROMPT, 12, generator=torch.Generator().manual_seed(s)) for s in (7, 7, 8)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_private_generator_leaves_the_global_state_alone() -> None:
    state = torch.get_rng_state()
    generate(build(), PROMPT, 3, generator=torch.Generator())  # build seeds and draws, so compare after a second build
    build()
    torch.set_rng_state(state)
    model = build()
    state = torch.get_rng_state()
    generate(model, PROMPT, 3, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)


def test_stops_before_the_stop_id() -> None:
    model = build()
    greedy = generate(model, PROMPT, 10, temperature=0).tolist()
    stop = greedy[4]
    first = greedy.index(stop)
    assert generate(model, PROMPT, 10, temperature=0, stop_id=stop).tolist() == greedy[:first]


def test_padded_ids_are_never_drawn() -> None:
    model = build()  # 61 ids in 128 rows
    with torch.no_grad():
        model.embedding.weight[61:] *= 50
    drawn = generate(model, PROMPT, 200, temperature=50.0, generator=torch.Generator().manual_seed(0))
    assert drawn.max() < 61
    assert model.logits(torch.randn(1, 24, dtype=torch.float64))[0, 61:].max() == -torch.inf


@pytest.mark.parametrize("position", list(Position))
def test_beyond_the_context_it_goes_on_from_the_newer_half(position: Position) -> None:
    model = build(position=position)
    out = generate(model, PROMPT, 60, temperature=0)
    assert len(out) == 60
    # 32 ids fill the context; the 33rd is drawn from the last 16, at positions 0 to 15
    ids = torch.cat((PROMPT, out))
    with torch.no_grad():
        assert ids[32] == recomputed(model, ids[:32]).argmax()
        assert ids[33] == recomputed(model, ids[17:33]).argmax()


def test_a_prompt_longer_than_the_context_is_read_from_its_end() -> None:
    model = build()
    prompt = torch.randint(61, (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(generate(model, prompt, 5, temperature=0), generate(model, prompt[-32:], 5, temperature=0))


def test_one_position_is_enough() -> None:
    assert len(generate(build(max_positions=1), PROMPT, 4)) == 4


def test_mode_is_restored_and_dropout_is_off() -> None:
    model = build(dropout=0.5)
    first = generate(model, PROMPT, 8, temperature=0)
    assert model.training
    assert torch.equal(first, generate(model, PROMPT, 8, temperature=0))
    assert not generate(model.eval(), PROMPT, 0).numel()
    assert not model.training


def test_works_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(build().float(), PROMPT, 4)) == 4


def frequencies(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([draw(logits, temperature, top_p, generator) for _ in range(4000)])
    return torch.bincount(drawn, minlength=len(logits)) / 4000


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -torch.inf])
    for temperature in (0.5, 1.0, 4.0):
        expected = (logits / temperature).softmax(0)
        torch.testing.assert_close(frequencies(logits, temperature, 1.0), expected, rtol=0, atol=0.03)
    assert draw(logits, 0, 1.0).item() == 0


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    expected = {0.4: [1], 0.5: [1], 0.6: [1, 3], 0.9: [0, 1, 3], 1.0: [0, 1, 2, 3], 1e-6: [1]}
    for top_p, kept in expected.items():
        share = frequencies(logits, 1.0, top_p)
        assert share.nonzero().flatten().tolist() == kept, top_p
        probs = logits.exp()[kept]
        torch.testing.assert_close(share[kept], probs / probs.sum(), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"prompt": torch.empty(0, dtype=torch.int64)}, "prompt must be a non-empty 1-d tensor"),
    ],
)
def test_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(build(), **{"prompt": PROMPT, "max_new_tokens": 1, **values})
