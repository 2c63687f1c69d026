"""The comparison of backends: equal ones are at distance 0, other weights are not, a drift fails and is on record."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from pathlib import Path

import pytest

from train import cli, compare_attention, readme
from train.__main__ import COMMAND
from train.compare_attention import Backend
from train.schema import Attention, RunConfig


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


def test_record(tmp_path: Path, overrides: list[str], one_torch_thread: None) -> None:
    output = tmp_path / "record.json"
    assert compare_attention.main(["--backends", "reference,auto", "--output", str(output), *overrides]) == 0
    record = json.loads(output.read_text())
    assert list(record["losses"]) == ["reference", "auto", "noise"]
    assert record["losses"]["reference"] == record["losses"]["auto"]
    assert len(record["losses"]["reference"]) == 4
    assert record["distance_from_first"]["auto"]["max"] == 0
    noise = record["distance_from_first"]["noise"]
    assert 0 < noise["max"] < 0.1
    limits = {"factor": 3, "drift": 3 * noise["mean"], "drift_end": 3 * noise["end"]}
    assert record["limits"] == pytest.approx(limits)
    assert record["drifting"] == []
    assert record["last_steps"] == 2
    assert record["tokens_per_step"] == 128
    assert record["n_params"] > 300 * 16
    assert record["command"].endswith(" ".join(["--backends reference,auto", *overrides]))
    assert output.with_suffix(".png").stat().st_size > 1000


def train_stub(monkeypatch: pytest.MonkeyPatch, curves: dict[str, list[float]]) -> list[tuple[str, str, str | None]]:
    """Stands in for training: these losses by the run's name. Returns its calls: (name, attention, FA2_ARCH)."""
    calls = []

    def losses(config: RunConfig) -> list[float]:
        calls.append((config.name, config.attention.value, os.environ.get("FA2_ARCH")))
        run_dir = Path(config.run_root) / config.name
        run_dir.mkdir()
        (run_dir / "summary.json").write_text('{"n_params": 7}')
        return curves[config.name]

    monkeypatch.setattr(compare_attention, "losses", losses)
    monkeypatch.setattr(compare_attention, "check", lambda config, backends: None)  # no GPU is needed
    return calls


NOISY = {"torch": [4.0, 3.0, 2.0, 1.0], "noise": [4.1, 2.9, 2.1, 0.9]}  # at distance 0.1, without a drift


def test_a_family_is_asked_for_in_its_run_alone(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FA2_ARCH", "sm90")
    same = NOISY["torch"]
    calls = train_stub(monkeypatch, NOISY | {"fa2": same, "fa2_sm80": same})
    output = tmp_path / "record.json"
    assert compare_attention.main(["--backends", "torch,fa2,fa2:sm80", "--output", str(output), *overrides]) == 0
    assert calls == [
        ("torch", "torch", None),
        ("fa2", "fa2", None),
        ("fa2_sm80", "fa2", "sm80"),
        ("noise", "torch", None),
    ]
    assert os.environ["FA2_ARCH"] == "sm90"
    assert list(json.loads(output.read_text())["losses"]) == ["torch", "fa2", "fa2:sm80", "noise"]


def test_a_drift_fails_and_is_on_record(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # fa2 lies 0.4 above at the end: beyond 3 times the noise there, within that over the run
    train_stub(monkeypatch, NOISY | {"fa2": [4.0, 3.0, 2.4, 1.4]})
    output = tmp_path / "record.json"
    arguments = ["--backends", "torch,fa2", "--output", str(output), *overrides]
    assert compare_attention.main(arguments) == 1
    assert "fa2 drifts from torch" in capsys.readouterr().err
    assert json.loads(output.read_text())["drifting"] == ["fa2"]
    assert output.with_suffix(".png").exists()
    assert compare_attention.main(["--factor", "5", *arguments]) == 0
    record = json.loads(output.read_text())
    assert record["limits"]["factor"] == 5
    assert "--backends torch,fa2 --factor 5 data=synthetic" in record["command"]


def test_a_loss_that_is_no_number_is_a_drift() -> None:
    apart = compare_attention.distances(NOISY | {"fa2": [4.0, 3.0, math.nan, 1.0]})
    assert compare_attention.drifting(apart, compare_attention.drift_limits(apart, 3.0)) == ["fa2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lrr=1"], "optim.lr"),
        (["--backends", "torch,fa3"], "--backends must be of .*fa2:sm80.*, got 'fa3'"),
        (["--backends", "torch:sm80"], "--backends must be of"),
        (["--backends", "fa2,fa2"], "--backends must name each one once, got fa2,fa2"),
        (["--backends", "reference,fa2"], "attention=fa2 cannot run here"),  # before the first has trained
    ],
)
def test_mistake_is_one_line(
    tmp_path: Path, overrides: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert compare_attention.main(["--output", str(tmp_path / "r.json"), *arguments, *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.compare_attention: error: ")
    assert re.search(message, line)


def test_distances() -> None:
    apart = compare_attention.distances({"a": [1.0, 2.0, 3.0, 4.0], "b": [1.5, 2.0, 2.75, 4.25]})
    assert apart == {"b": {"mean": 0.25, "max": 0.5, "end": 0.25, "drift": 0.125, "drift_end": 0.0}}


@pytest.mark.parametrize(("steps", "last"), [(1, 1), (4, 2), (200, 100), (500, 100)])
def test_last_steps(steps: int, last: int) -> None:
    assert compare_attention.last_steps(steps) == last


def test_running_mean() -> None:
    assert compare_attention.running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


SM80 = [f"void fa2::sm80::attention_{part}<__nv_bfloat16, Config>(Params)" for part in ("fwd", "bwd")]
SM90 = [name.replace("sm80", "sm90") for name in SM80]


def test_kernels_of_another_family_are_refused() -> None:
    assert compare_attention.families(SM80[:1] + SM90[1:]) == {"fwd": "sm80", "bwd": "sm90"}
    sm80, either = Backend(Attention.fa2, "sm80"), Backend(Attention.fa2)
    assert compare_attention.check_kernels(sm80, SM80) == SM80
    assert compare_attention.check_kernels(either, SM90) == SM90
    for wrong in (SM90, SM80[:1], SM80[:1] + SM90[1:]):
        with pytest.raises(ValueError, match="fa2:sm80 must run kernels of sm80, the profiler saw"):
            compare_attention.check_kernels(sm80, wrong)


@pytest.mark.gpu
def test_kernels_are_those_asked_for(overrides: list[str]) -> None:
    overrides = [*(o for o in overrides if "accelerator" not in o), "model.d_model=128"]
    config = cli.build(COMMAND, overrides)
    kernels = compare_attention.attention_kernels(config, Backend(Attention.fa2, "sm80"))
    if kernels:  # a machine may lack the profiler's library
        assert compare_attention.families(kernels) == {"fwd": "sm80", "bwd": "sm80"}
    assert compare_attention.attention_kernels(config, Backend(Attention.reference)) == []


@pytest.mark.parametrize("made", [readme.ATTENTION, readme.ATTENTION_125M])
def test_the_readmes_commands_parse(made: tuple[str, str]) -> None:
    path, command = made
    assert command.startswith("python -m train.compare_attention ")
    options = compare_attention.parser().parse_args([*shlex.split(command)[3:], "--output", path])
    compare_attention.parse_backends(options.backends)
    cli.build(COMMAND, options.overrides)


def test_readme_table(tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    command = "python -m train.compare_attention …"
    assert readme.losses_table("r.json", command) == f"No record yet: `{command} --output r.json` makes it."
    train_stub(monkeypatch, NOISY | {"fa2_sm80": [4.0, 3.0, 2.2, 1.0]})
    output = tmp_path / "r.json"
    assert compare_attention.main(["--backends", "torch,fa2:sm80", "--output", str(output), *overrides]) == 0
    table = readme.losses_table("r.json", command)
    assert "| `fa2:sm80` | 0.0500 | 0.1000 | +0.0500 | +0.1000 |" in table
    assert "| ±0.3000 | ±0.3000 |" in table
    assert "Drifting: none." in table
    record = json.loads(output.read_text())
    output.write_text(json.dumps(record | {"kernels": {"fa2:sm80": SM80}, "drifting": ["fa2:sm80"]}))
    table = readme.losses_table("r.json", command)
    assert "| `fa2:sm80` (fwd sm80, bwd sm80) |" in table
    assert "Drifting: `fa2:sm80`." in table
