"""Micro-batches under autocast, their gradients added up: what the tests of the training step compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT


def accumulate(model: GPT, batches: Iterable[Any], device: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses, and a copy of every gradient."""
    losses = []
    for inputs in batches:
        with torch.autocast(device, torch.bfloat16):
            loss = model.loss(*inputs)
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
