"""train.reproduce on a GPU with its tiny row: each backend's kernels, packed documents, and a step's time budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from train.reproduce.__main__ import main

pytestmark = pytest.mark.gpu


def test_every_backend_and_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    budget = "budget=[fa2,sdpa_cudnn,sdpa_flash,eager]"
    assert main(["rows=debug", budget, "steps=2", "documents=dense", f"output={tmp_path}"]) == 0
    record = json.loads((tmp_path / "reproduce.json").read_text())
    found = {cell["attention"]: cell for cell in record["cells"]}
    assert found.pop("torch")["status"] == "not_applicable"
    for cell in found.values():
        assert cell["status"] == "ok", cell["reason"]
        assert cell["kernels"]
        assert cell["peak_memory_bytes"] > 0
        assert cell["gpu"] or shutil.which("nvidia-smi") is None
        seconds, wall = cell["budget"]["seconds"], cell["budget"]["wall_s"]
        assert sum(seconds.values()) == pytest.approx(wall, rel=1e-6)
        for part in ("GEMM", "attention", "elementwise", "loss, its GEMM", "loss, the rest", "clipping", "optimiser"):
            assert seconds[part] > 0, part
        assert not cell["budget"]["kernels"].get("unknown kernels"), "add their names to train/reproduce/kernels.py"
        assert (tmp_path / f"budget_debug_dense_{cell['attention']}.png").exists()
    losses = [cell["loss"] for cell in found.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)


def test_packed_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["rows=debug", "attention=torch,fa2", "documents=packed", "steps=2", f"output={tmp_path}"]
    assert main(arguments) == 0
    cells = json.loads((tmp_path / "reproduce.json").read_text())["cells"]
    assert [cell["status"] for cell in cells] == ["ok", "ok"]
    assert cells[0]["sum_len_sq"] == cells[1]["sum_len_sq"]
