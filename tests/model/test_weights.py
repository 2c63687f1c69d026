"""Weights and shape survive the trip through a safetensors file."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model.attention import reference_attention
from model.config import GPTConfig, Mlp, Norm, Position
from model.gpt import GPT
from model.weights import config_from_json, config_to_json, export_safetensors, load_safetensors

TINY = GPTConfig(vocab_size=61, max_positions=32, n_layer=2, d_model=24, nheads_q=4, d_ff=40)


@pytest.mark.parametrize("tied", [True, False])
def test_roundtrip(tmp_path: Path, tied: bool) -> None:
    config = replace(TINY, tie_embeddings=tied, position=Position.learned, norm=Norm.rmsnorm, mlp=Mlp.swiglu)
    model = GPT(config, reference_attention)
    export_safetensors(model, tmp_path / "model.safetensors")
    loaded = load_safetensors(tmp_path / "model.safetensors", reference_attention)
    assert loaded.config == config
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    tokens, limits = torch.arange(9), torch.tensor([0, 9], dtype=torch.int32)
    assert torch.equal(loaded(tokens, tokens.int(), limits, 9), model(tokens, tokens.int(), limits, 9))
    loaded.loss(tokens, tokens, tokens.int(), limits, 9).backward()
    assert all(p.grad is not None for p in loaded.parameters())
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_tied_matrix_is_stored_once(tmp_path: Path) -> None:
    model = GPT(TINY, reference_attention)
    export_safetensors(model, tmp_path / "m")
    with safe_open(tmp_path / "m", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert stored == model.n_params


def test_dtype_of_file_and_of_model(tmp_path: Path) -> None:
    export_safetensors(GPT(TINY, reference_attention), tmp_path / "m", dtype=torch.bfloat16)
    assert load_safetensors(tmp_path / "m", reference_attention).embedding.weight.dtype == torch.bfloat16
    assert load_safetensors(tmp_path / "m", reference_attention, dtype=torch.float32).norm.weight.dtype == torch.float32


def test_config_roundtrip_keeps_every_field() -> None:
    config = GPTConfig(
        7, 3, 11, 2, 20, 2, 1, 5, Norm.rmsnorm, 1e-6, Mlp.swiglu, Position.learned, 5e5, False, False, 0.5
    )
    assert asdict(config_from_json(config_to_json(config))) == asdict(config)
    with pytest.raises(ValueError, match=r"gpt_config must have keys of GPTConfig only, got \['depth'\]"):
        config_from_json('{"depth": 3}')


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with pytest.raises(FileNotFoundError, match="no weights file at"):
        load_safetensors(path, reference_attention)
    path.write_bytes(b"not a weights file")
    with pytest.raises(ValueError, match="weights must be a safetensors file, got"):
        load_safetensors(path, reference_attention)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="weights must carry 'gpt_config' in their metadata"):
        load_safetensors(path, reference_attention)
    save_file({"a": torch.zeros(1)}, path, {"gpt_config": config_to_json(TINY)})
    with pytest.raises(ValueError, match="weights must fit the config stored beside them"):
        load_safetensors(path, reference_attention)
