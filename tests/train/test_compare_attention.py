"""The comparison of backends: equal backends are at distance 0, other weights are not, and the record holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train import compare_attention


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    return [
        "data=synthetic",
        "data.synthetic_tokens=4096",
        "data.synthetic_document_tokens=40",
        "data.synthetic_vocab_size=300",
        "data.validation_fraction=0.2",
        f"data.cache_dir={tmp_path}/cache",
        "model.n_layer=1",
        "model.d_model=16",
        "model.nheads_q=2",
        "batch.context=64",
        "batch.micro_batch_tokens=128",
        "batch.global_batch_tokens=128",
        "trainer.max_steps=4",
        "trainer.accelerator=cpu",
        "optim.warmup_steps=1",
    ]


def test_record(tmp_path: Path, overrides: list[str]) -> None:
    output = tmp_path / "record.json"
    assert compare_attention.main(["--backends", "reference,auto", "--output", str(output), *overrides]) == 0
    record = json.loads(output.read_text())
    assert record["losses"]["reference"] == record["losses"]["auto"]
    assert len(record["losses"]["reference"]) == 4
    assert record["distance_from_first"]["auto"]["max"] == 0
    assert 0 < record["distance_from_first"]["noise"]["max"] < 0.1
    assert output.with_suffix(".png").stat().st_size > 1000


def test_mistake_is_one_line(tmp_path: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_attention.main(["--output", str(tmp_path / "r.json"), *overrides, "optim.lrr=1"]) == 2
    assert "optim.lr" in capsys.readouterr().err


def test_distances() -> None:
    apart = compare_attention.distances({"a": [1.0, 2.0], "b": [1.5, 2.0]})
    assert apart == {"b": {"mean": 0.25, "max": 0.5, "end": 0.0}}
