"""The schedule is a pure function of the step; the fused step clips, and skips what is not finite, on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from model.config import GPTConfig
from model.gpt import GPT
from train.optim import (
    apply_hyperparameters,
    build_adamw,
    decay_steps,
    gradient_norm,
    guard_step,
    learning_rate,
    set_learning_rate,
)
from train.schema import OptimConfig, Schedule


def rates(steps: int, **options: Any) -> list[float]:
    optim = OptimConfig(lr=1.0, **options)
    return [learning_rate(step, optim, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (10, 0), (10, 10), (100, 7), (101, 50)])
def test_every_schedule_warms_up_peaks_and_ends_at_its_floor(schedule: Schedule, steps: int, warmup: int) -> None:
    lr = rates(steps, schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.1)
    assert all(0 < value <= 1.0 for value in lr)
    assert lr[:warmup] == [(i + 1) / warmup for i in range(warmup)]
    if steps > warmup + 1:
        assert lr[-1] == pytest.approx(0.1)
        assert lr[warmup] == pytest.approx(1.0)
        assert lr[warmup:] == sorted(lr[warmup:], reverse=True)


def test_cosine_and_linear_halfway() -> None:
    # 4 warm-up steps, then 0, 1/2 and 1 of the way at steps 4, 14 and 24
    assert rates(25, schedule=Schedule.cosine, warmup_steps=4, min_lr_ratio=0.2)[14] == pytest.approx(0.6)
    assert rates(25, schedule=Schedule.linear, warmup_steps=4, min_lr_ratio=0.2)[14] == pytest.approx(0.6)
    cosine = rates(25, schedule=Schedule.cosine, warmup_steps=4, min_lr_ratio=0.0)[9]
    assert cosine == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_is_flat_until_its_decay() -> None:
    lr = rates(100, schedule=Schedule.wsd, warmup_steps=10, decay_steps=20, min_lr_ratio=0.0)
    assert lr[10:80] == [1.0] * 70
    assert lr[80] == pytest.approx(0.95)
    assert lr[99] == 0.0
    assert decay_steps(OptimConfig(schedule=Schedule.wsd), 500) == 100
    with pytest.raises(ValueError, match=r"optim\.decay_steps must be at most .*\(10\), got 11"):
        decay_steps(OptimConfig(warmup_steps=90, decay_steps=11), 100)


def test_the_rate_after_the_last_step_stays_at_the_floor() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=1, min_lr_ratio=0.3)
    assert learning_rate(1000, optim, 10) == pytest.approx(0.3)


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=40, vocab_multiple=8, n_layer=1, d_model=16, nheads_q=2), lambda *args: args[0])


def with_gradients(model: GPT, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_guarded_step_is_clip_grad_norm_and_adamw(scale: float, clip: float) -> None:
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, clip_grad_norm=clip)
    ours, theirs = tiny(), tiny()
    optimizer = build_adamw(ours, optim)
    matrices, others = theirs.decay_groups()
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=False,
        fused=False,
    )
    for step in range(3):
        with_gradients(ours, scale * (step + 1))
        with_gradients(theirs, scale * (step + 1))
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        norm = gradient_norm(optimizer)
        torch.testing.assert_close(norm, expected_norm)
        assert guard_step(optimizer, torch.tensor(1.0), norm, clip).item() == 0
        optimizer.step()
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_step_that_is_not_finite_changes_nothing(loss: float, gradient: float) -> None:
    model = tiny()
    optimizer = build_adamw(model, OptimConfig())
    with_gradients(model, 1.0)
    guard_step(optimizer, torch.tensor(1.0), gradient_norm(optimizer), 1.0)
    optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
    with_gradients(model, 1.0)
    next(model.parameters()).grad[0, 0] = gradient
    assert guard_step(optimizer, torch.tensor(loss), gradient_norm(optimizer), 1.0).item() == 1
    optimizer.step()
    for parameter, before, state in zip(model.parameters(), weights, moments, strict=True):
        assert torch.equal(parameter, before)
        assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())


def test_only_matrices_decay_and_the_configuration_wins_over_a_loaded_state() -> None:
    model = tiny()
    optimizer = build_adamw(model, OptimConfig(weight_decay=0.0))
    state = optimizer.state_dict()
    later = OptimConfig(weight_decay=0.3, beta1=0.5, eps=1e-6)
    fresh = build_adamw(model, later)
    fresh.load_state_dict(state)
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.0, 0.0]
    apply_hyperparameters(fresh, later)
    matrices, others = fresh.param_groups
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() < 2 for p in others["params"])
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert (matrices["betas"], matrices["eps"]) == ((0.5, 0.95), 1e-6)
    set_learning_rate(fresh, 0.25)
    assert {group["lr"] for group in fresh.param_groups} == {0.25}
