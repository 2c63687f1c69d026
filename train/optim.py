"""AdamW over two parameter groups, and the learning rate as a pure function of the optimiser step.

A step whose loss or gradient is not finite is skipped on the device: fused AdamW reads `found_inf` there, the host is
not asked. The same kernel divides the gradients by `grad_scale`, which clips them without a pass of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import AdamW

from train.schema import OptimConfig, Schedule

if TYPE_CHECKING:
    from model.gpt import GPT


def decay_steps(optim: OptimConfig, max_steps: int) -> int:
    """Length of WSD's final decay.

    Raises:
        ValueError: warm-up and decay do not fit into the run.
    """
    room = max_steps - optim.warmup_steps
    if optim.decay_steps is None:
        return min(max(1, max_steps // 5), max(1, room))
    if optim.decay_steps > room:
        raise ValueError(
            f"optim.decay_steps must be at most trainer.max_steps - optim.warmup_steps ({room}), "
            f"got {optim.decay_steps}"
        )
    return optim.decay_steps


def learning_rate(step: int, optim: OptimConfig, max_steps: int) -> float:
    """Learning rate of optimiser step `step` (0-based): linear warm-up to `lr`, then the schedule.

    The last step of the run, max_steps - 1, has exactly lr × min_lr_ratio; later steps keep it.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    last = max_steps - 1
    if optim.schedule is Schedule.wsd:
        length = decay_steps(optim, max_steps)
        progress = (step - (last - length)) / length
    else:
        progress = (step - optim.warmup_steps) / max(1, last - optim.warmup_steps)
    progress = min(1.0, max(0.0, progress))
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if optim.schedule is Schedule.cosine else 1.0 - progress
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape)


def build_adamw(model: GPT, optim: OptimConfig) -> AdamW:
    """Fused AdamW (CPU and CUDA both have it); weight decay on matrices alone."""
    matrices, others = model.decay_groups()
    groups = [{"params": list(matrices), "decays": True}, {"params": list(others), "decays": False}]
    optimizer = AdamW([group for group in groups if group["params"]], lr=optim.lr, fused=True)
    apply_hyperparameters(optimizer, optim)
    return optimizer


def apply_hyperparameters(optimizer: torch.optim.Optimizer, optim: OptimConfig) -> None:
    """Set what the configuration says; after a resume too, where the groups come back from the checkpoint."""
    for group in optimizer.param_groups:
        group["betas"] = (optim.beta1, optim.beta2)
        group["eps"] = optim.eps
        group["weight_decay"] = optim.weight_decay if group["decays"] else 0.0


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """() global 2-norm of all gradients, fp32, on their device."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).float()


def guard_step(optimizer: torch.optim.Optimizer, loss: Tensor, norm: Tensor, clip_grad_norm: float) -> Tensor:
    """Tell the fused kernel how to clip the coming step and whether to skip it; nothing is read by the host.

    Args:
        loss: () the step's loss over all ranks.
        norm: () the gradients' global norm.
        clip_grad_norm: largest norm let through; 0 turns clipping off.

    Returns:
        () fp32 on the device: 1 where the step is skipped, else 0.
    """
    found_inf = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.grad_scale = (norm / clip_grad_norm).clamp(min=1.0) if clip_grad_norm else None  # type: ignore[attr-defined]
    return found_inf
