"""Weights in and out of one safetensors file, with the model's shape in its metadata.

Knows the model; nothing of training. `safetensors` is imported where it is used: the model trains without it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from enum import Enum
from pathlib import Path

import torch

from model.attention import AttentionFn
from model.config import GPTConfig
from model.gpt import GPT


def export_safetensors(model: GPT, path: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write the model's weights and its config; a file of that name is replaced at once or not at all.

    Args:
        model: a tied matrix is stored once, as `embedding.weight`.
        path: of the file to write.
        dtype: of the stored weights; None keeps the model's.
    """
    from safetensors.torch import save_file

    path = Path(path)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in model.state_dict().items()}
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt", "gpt_config": config_to_json(model.config)})
    os.replace(partial, path)


def load_safetensors(
    path: str | Path, attention: AttentionFn, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> GPT:
    """The model that `export_safetensors` wrote.

    Args:
        path: of the file.
        attention: backend for the model.
        device: where its weights go.
        dtype: of its weights; None keeps the file's.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a safetensors file, not one of ours, or weights that do not fit the config in it.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no weights file at {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"weights must be a safetensors file, got {path} ({error})") from error
    if "gpt_config" not in metadata:
        raise ValueError(f"weights must carry 'gpt_config' in their metadata, got {path} without it")
    with torch.device("meta"):
        model = GPT(config_from_json(metadata["gpt_config"]), attention)
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"weights must fit the config stored beside them, got {path} ({error})") from error
    return model.to(dtype=dtype) if dtype is not None else model


def config_to_json(config: GPTConfig) -> str:
    """The config as a JSON object; enums by value."""
    return json.dumps({k: v.value if isinstance(v, Enum) else v for k, v in asdict(config).items()})


def config_from_json(text: str) -> GPTConfig:
    """The inverse of `config_to_json`; missing keys take their defaults, unknown ones are refused."""
    values = json.loads(text)
    defaults = GPTConfig()
    known = {f.name for f in fields(GPTConfig)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"gpt_config must have keys of GPTConfig only, got {unknown}")
    for key, value in values.items():
        default = getattr(defaults, key)
        if isinstance(default, Enum):
            values[key] = type(default)(value)
    return GPTConfig(**values)
