"""The shared command line: help, Hydra's flags, texts past Hydra's grammar, and overrides that take effect in a run."""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import train.__main__ as train_main
import train.prepare
from data.config import Packing
from train import cli
from train.__main__ import COMMAND, main
from train.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "model.n_layer=1",
    "model.d_model=32",
    "model.nheads_q=2",
    "model.max_positions=64",
    "tokenizer.vocab_size=300",
    "batch.context=64",
    "batch.micro_batch_tokens=128",
    "batch.global_batch_tokens=128",
    "optim.warmup_steps=1",
    "trainer.max_steps=3",
    "trainer.log_every=1",
    "trainer.progress_bar=false",
    "trainer.accelerator=cpu",
    "trainer.sample_tokens=4",
    "data.validation_fraction=0.2",
    "data.processes=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a small text corpus; the data cache in it is shared by all runs of this file."""
    folder = tmp_path_factory.mktemp("cli")
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(200)]
    for i in range(40):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, k=30 + i)))
    other = folder / "other"
    other.mkdir()
    for i in range(30):
        (other / f"{i}.txt").write_text(f"quite another text, number {i}. " * (2 + i % 5))
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick_start() -> Iterator[None]:
    """No second of matrix products before each of these runs, and no pictures after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.report.write_report", lambda run_dir: run_dir)
        patch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e11)
        yield


def arguments(folder: Path, name: str, *overrides: str) -> list[str]:
    given = {override.partition("=")[0] for override in overrides}
    base = [
        "data=files",
        f"data.paths=[{folder}/*.txt]",
        f"data.cache_dir={folder}/cache",
        f"run_root={folder}/runs",
        f"name={name}",
        *TINY,
    ]
    return [argument for argument in base if argument.partition("=")[0] not in given] + list(overrides)


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def losses(run_dir: Path) -> list[str]:
    return [row["loss"] for row in rows(run_dir)]


def checkpoint(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("*.ckpt"))
    return torch.load(newest, weights_only=True)


def weights_dtype(run_dir: Path) -> torch.dtype:
    return next(iter(checkpoint(run_dir)["state_dict"].values())).dtype


@pytest.fixture(scope="module")
def baseline(folder: Path) -> Path:
    assert main(arguments(folder, "baseline")) == 0
    return folder / "runs" / "baseline"


# each: (overrides, what is seen of it in the run directory, given the run without them)
EFFECTS: dict[str, tuple[list[str], Any]] = {
    "steps": (["trainer.max_steps=2"], lambda run, base: (len(rows(run)), len(rows(base))) == (2, 3)),
    "logging": (["trainer.log_every=3"], lambda run, base: [row["step"] for row in rows(run)] == ["3"]),
    "learning rate": (
        ["optim.lr=1e-4"],
        lambda run, base: float(rows(run)[0]["lr"]) == pytest.approx(float(rows(base)[0]["lr"]) / 30),
    ),
    "schedule": (
        ["optim.schedule=wsd", "optim.decay_steps=2"],
        lambda run, base: float(rows(run)[1]["lr"]) < float(rows(base)[1]["lr"]),
    ),
    "seed": (["seed=7"], lambda run, base: losses(run)[0] != losses(base)[0]),
    "model": (
        ["model.n_layer=2"],
        lambda run, base: (
            json.loads((run / "summary.json").read_text())["n_params"]
            > json.loads((base / "summary.json").read_text())["n_params"]
        ),
    ),
    "tokenizer": (
        ["tokenizer.vocab_size=270"],
        lambda run, base: (
            checkpoint(run)["model_config"]["vocab_size"] == 270
            and checkpoint(base)["model_config"]["vocab_size"] == 300
        ),
    ),
    "batch": (
        ["batch.global_batch_tokens=256"],
        lambda run, base: int(rows(run)[-1]["tokens"]) > 1.5 * int(rows(base)[-1]["tokens"]),
    ),
    "packing": (
        [f"batch.packing={Packing.pad.value}"],
        lambda run, base: int(rows(run)[-1]["tokens"]) < int(rows(base)[-1]["tokens"]),
    ),
    "data": (
        ["data.paths=[{folder}/other/*.txt]"],
        lambda run, base: checkpoint(run)["data_fingerprint"] != checkpoint(base)["data_fingerprint"],
    ),
    "precision": (["trainer.precision=64-true"], lambda run, base: weights_dtype(run) == torch.float64),
    "sample": (
        ["trainer.sample_tokens=0"],
        lambda run, base: (base / "samples.txt").exists() and not (run / "samples.txt").exists(),
    ),
    "checkpoints": (
        ["trainer.checkpoint_every=1", "trainer.keep_checkpoints=1"],
        lambda run, base: len(list((run / "checkpoints").glob("*.ckpt"))) <= 2,
    ),
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_override_takes_effect_in_a_run(effect: str, folder: Path, baseline: Path) -> None:
    overrides, seen = EFFECTS[effect]
    name = effect.replace(" ", "_")
    assert main(arguments(folder, name, *(text.format(folder=folder) for text in overrides))) == 0
    assert seen(folder / "runs" / name, baseline)


def test_a_run_leaves_its_directory_and_nothing_else(
    folder: Path, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments(folder, "here", "run_root=runs")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    kept = {path.name for path in (tmp_path / "runs" / "here").iterdir()}
    assert kept >= {"config.yaml", "metrics.csv", "tokenizer.json", "samples.txt", "checkpoints"}
    assert "max_steps: 3" in (tmp_path / "runs" / "here" / "config.yaml").read_text()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs that would have been trained."""
    configs: list[RunConfig] = []
    monkeypatch.setattr(train_main, "run", configs.append)
    monkeypatch.setattr(
        train_main,
        "COMMAND",
        cli.Command("train", "config", RunConfig, configs.append, groups=train_main.GROUPS),
    )
    return configs


def test_help_reads_well(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("python -m train [group=option ...] [key=value ...]")
    for group in train_main.GROUPS:
        assert f"\n{group}: {', '.join(cli.group_options(group))}" in text
    for said in ("runs/default", "report.html", "resume=auto", "batch.context", "exit code 2", "lr_${optim.lr}"):
        assert said in text
    assert max(map(len, text.splitlines())) <= 160


@pytest.mark.parametrize("module", ["prepare", "generate", "evaluate", "export", "report"])
def test_every_command_has_help(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = __import__(f"train.{module}", fromlist=["main"])
    assert command.main(["--help"]) == 0
    assert capfd.readouterr().out.startswith(f"python -m train.{module} ")


def test_cfg_prints_the_composed_config(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "experiment=gpt3_125m", "optim.lr=0.5"]) == 0
    text = capfd.readouterr().out
    assert "name: gpt3_125m" in text
    assert "lr: 0.5" in text


def test_help_works_with_the_check_of_python_3_14(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There, argparse looks for '%' in every help text when an argument is added; Hydra 1.3's is no string."""
    add_argument = argparse.ArgumentParser.add_argument

    def add_and_check(self: Any, *args: Any, **kwargs: Any) -> argparse.Action:
        action = add_argument(self, *args, **kwargs)
        self._check_help(action)
        return action

    def check_help(self: Any, action: argparse.Action) -> None:
        if action.help and "%" in action.help:
            pass

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", add_and_check)
    assert main(["--help"]) == 0
    assert "python -m train" in capfd.readouterr().out


def test_multirun_runs_one_after_the_other(
    ran: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_main.main(["-m", "optim.lr=1e-3,2e-3", "name=lr_${optim.lr}"]) == 0
    assert [(config.name, config.optim.lr) for config in ran] == [("lr_0.001", 0.001), ("lr_0.002", 0.002)]


def test_a_flag_may_stand_between_overrides(
    ran: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_main.main(["trainer.max_steps=70", "-m", "optim.lr=1e-3,2e-3", "name=lr_${optim.lr}"]) == 0
    assert [(config.optim.lr, config.trainer.max_steps) for config in ran] == [(0.001, 70), (0.002, 70)]


def test_a_mistake_inside_a_multirun_is_one_line(
    ran: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_main.main(["-m", "trainer.max_steps=100,-1"]) == 2
    assert len(ran) == 1
    assert "trainer.max_steps must be positive, got -1" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("trainer.sample_prompt=def main():\n", "sample_prompt", "def main():\n"),
        ("trainer.sample_prompt=a=${b} 'c' \"d\" \\", "sample_prompt", "a=${b} 'c' \"d\" \\"),
        ("trainer.sample_prompt=[x, {", "sample_prompt", "[x, {"),
        ("trainer.sample_prompt=plain", "sample_prompt", "plain"),
    ],
)
def test_text_that_hydra_cannot_parse_is_taken_as_written(argument: str, key: str, value: str) -> None:
    assert getattr(cli.build(COMMAND, [argument]).trainer, key) == value


def test_paths_need_no_brackets_and_may_hold_an_equals_sign() -> None:
    build = cli.build(COMMAND, ["data=files", "data.paths=corpus/*.txt", "resume=old/step=3.ckpt"])
    assert build.data.paths == ["corpus/*.txt"]
    assert build.resume == "old/step=3.ckpt"
    assert cli.build(COMMAND, ["data=files", "data.paths=a.txt,b/*.txt"]).data.paths == ["a.txt", "b/*.txt"]
    assert cli.build(COMMAND, ["data=files", "data.paths=[a.txt, 'b c.txt']"]).data.paths == ["a.txt", "b c.txt"]


def test_texts_go_through_hydras_flags_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "data=files", "data.paths=a=b.txt,c d.txt", "trainer.sample_prompt=f('x')"]) == 0
    text = capfd.readouterr().out
    assert "  - a=b.txt\n  - c d.txt\n" in text
    assert "sample_prompt: f('x')\n" in text


def test_any_text_survives() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(
            draw.choices(["\\", "${", "}", "'", '"', "\n", ":", " ", ",", "=", "[", "é"], k=draw.randint(0, 7))
        )
        override = OverridesParser.create().parse_override(f"prompt={cli._quote(text)}")
        assert OmegaConf.create({"prompt": override.value()}).prompt == text


def test_prepare_fills_the_cache_of_the_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = f"data.cache_dir={tmp_path}/cache"
    assert train.prepare.main(arguments(folder, "prepared", cache)) == 0
    said = capsys.readouterr().out
    assert "tokenizing" in said
    assert "documents" in said.splitlines()[-4]
    assert main(arguments(folder, "prepared", cache)) == 0
    assert "tokenizing" not in capsys.readouterr().out


def test_the_last_of_two_equal_keys_wins() -> None:
    assert cli.build(COMMAND, ["trainer.sample_prompt=f(", "trainer.sample_prompt=g"]).trainer.sample_prompt == "g"
    assert cli.build(COMMAND, ["seed=1", "seed=2"]).seed == 2


def test_exit_code_and_stream_of_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "train", "optim.lrr=1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "train: error: unknown key 'optim.lrr', did you mean optim.lr?\n"


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: RunConfig) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(cli.Command("train", "config", RunConfig, broken), [])


def test_hydra_full_error_lets_a_mistake_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="unknown key"):
        main(["optim.lrr=1"])
