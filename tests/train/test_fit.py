"""`fit` on a tiny model and tiny files: what it prints and writes, and that every switch has its effect."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from data.config import BatchConfig, DataConfig, Packing, Source, TokenizerConfig
from model.config import GPTConfig, Mlp, Norm
from model.gpt import GPT
from train import build
from train.checkpoint import list_checkpoints, load_model, plain, read_checkpoint
from train.fit import FitResult, fit
from train.metrics import read_metrics
from train.schema import Attention, LoggerConfig, LoggerKind, OptimConfig, RunConfig, Schedule, TrainerConfig

ROOT = Path(__file__).resolve().parents[2]
Change = Callable[[RunConfig], RunConfig]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("fit")
    text = folder / "text"
    text.mkdir()
    draw = random.Random(0)
    words = ["for", "in", "while", "return", "import", "def", "class", "yield"]
    for i in range(40):
        document = " ".join(draw.choice(words) for _ in range(draw.randint(20, 200)))
        (text / f"{i}.txt").write_text(document, encoding="utf-8")
    return RunConfig(
        name="base",
        run_root=str(folder / "runs"),
        model=GPTConfig(n_layer=2, d_model=32, nheads_q=2, max_positions=64),
        data=DataConfig(
            source=Source.files,
            paths=[str(text)],
            cache_dir=str(folder / "cache"),
            validation_fraction=0.2,
            processes=1,
        ),
        tokenizer=TokenizerConfig(vocab_size=300),
        batch=BatchConfig(context=64, micro_batch_tokens=128, global_batch_tokens=256),
        optim=OptimConfig(warmup_steps=1),
        trainer=TrainerConfig(
            max_steps=3,
            accelerator="cpu",
            log_every=1,
            validate_every=0,
            checkpoint_every=10,
            progress_bar=False,
            sample_tokens=0,
        ),
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second of matrix products and no pictures in each of these runs."""
    monkeypatch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e9)
    monkeypatch.setattr("train.report.write_report", lambda run_dir: None)


@pytest.fixture(scope="module")
def plain_run(base: RunConfig) -> FitResult:
    """What each change is compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e9)
        patch.setattr("train.report.write_report", lambda run_dir: None)
        return fit(base)


def trainer(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, trainer=replace(config.trainer, **changes))


def test_a_run_says_and_leaves_what_a_user_needs(
    base: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Path] = []
    monkeypatch.setattr("train.report.write_report", reported.append)
    config = trainer(replace(base, name="whole"), max_steps=12, log_every=4, validate_every=5, sample_tokens=8)
    config = trainer(config, checkpoint_every=2, keep_checkpoints=2, progress_bar=True)
    result = fit(config)
    captured = capsys.readouterr()
    for expected in (
        "attention: auto takes reference",
        "parameters (2 layers of 32, 2 heads), 32-true on CPU",
        "12 steps of 256 tokens (2 × 128 on 1 rank)",
        "step 5: validation loss",
        "step 12/12: loss",
        "bits per byte (unigram",
        "gzip -9",
        "sample (temperature",
        str(result.run_dir),
        "report.html",
    ):
        assert expected in captured.out
    assert captured.out.count("attention:") == 1
    assert "litlogger" not in captured.err + captured.out
    assert reported == [result.run_dir]
    rows = {int(row["step"]): row for row in read_metrics(result.metrics)}
    assert sorted(rows) == [4, 5, 8, 10, 12], "a row for each log point and each validation"
    assert sorted(result.losses) == [4, 8, 12]
    assert {step for step in rows if "val_loss" in rows[step]} == {5, 10, 12}
    assert {"tokens", "lr", "grad_norm", "tokens_per_s", "gemm_util", "skipped_steps", "time"} <= set(rows[12])
    # 2 newest besides the final one
    names = [path.name for path in list_checkpoints(result.run_dir)]
    assert names == ["step_000012.ckpt", "step_000010.ckpt", "step_000008.ckpt"]
    files = {path.name for path in result.run_dir.iterdir()}
    assert {"config.yaml", "tokenizer.json", "environment.json", "packing.json", "data.json", "samples.txt"} <= files
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["val_bits_per_byte"] == result.val_bits_per_byte
    assert summary["gzip_bits_per_byte"] > 0
    assert summary["unigram_bits_per_byte"] > 0
    bytes_per_token = result.val_loss / math.log(2) / result.val_bits_per_byte  # type: ignore[operator]
    assert 1 < bytes_per_token < 20


def test_a_checkpoint_opens_without_a_trainer(plain_run: FitResult, base: RunConfig) -> None:
    model, checkpoint = load_model(plain_run.run_dir, torch.device("cpu"), say=lambda line: None)
    assert checkpoint["run_config"]["model"]["n_layer"] == 2
    assert checkpoint["run_config"] == plain(base)
    assert {"tokenizer_fingerprint", "data_fingerprint", "rng_states", "wandb_run_id", "counters"} <= set(checkpoint)
    assert model.config.vocab_size == checkpoint["model_config"]["vocab_size"]
    assert not model.training
    assert all(torch.equal(value, checkpoint["state_dict"][f"model.{k}"]) for k, value in model.state_dict().items())


def _groups(result: FitResult) -> list[dict[str, Any]]:
    return read_checkpoint(result.checkpoint)["optimizer_states"][0]["param_groups"]


def _lr(result: FitResult) -> list[float]:
    return [row["lr"] for row in read_metrics(result.metrics)]


# Each entry changes one key and says how a run shows that it took effect, beside the run without the change.
OVERRIDES: dict[str, tuple[Change, Callable[[FitResult, FitResult], bool]]] = {
    "optim.lr": (
        lambda c: replace(c, optim=replace(c.optim, lr=1e-4)),
        lambda new, old: _lr(new)[0] == 1e-4 and new.losses[3] != old.losses[3],
    ),
    "optim.schedule": (
        lambda c: replace(c, optim=replace(c.optim, schedule=Schedule.wsd)),
        lambda new, old: _lr(new)[1] == _lr(new)[0] != _lr(old)[2],
    ),
    "optim.weight_decay": (
        lambda c: replace(c, optim=replace(c.optim, weight_decay=0.7)),
        lambda new, old: [g["weight_decay"] for g in _groups(new)] == [0.7, 0.0],
    ),
    "optim.clip_grad_norm": (
        lambda c: replace(c, optim=replace(c.optim, clip_grad_norm=1e-4)),
        lambda new, old: new.losses[1] == old.losses[1] and new.losses[3] != old.losses[3],
    ),
    "model.n_layer": (
        lambda c: replace(c, model=replace(c.model, n_layer=3)),
        lambda new, old: any(".blocks.2." in key for key in read_checkpoint(new.checkpoint)["state_dict"]),
    ),
    "model.norm, model.mlp": (
        lambda c: replace(c, model=replace(c.model, norm=Norm.rmsnorm, mlp=Mlp.swiglu, bias=False)),
        lambda new, old: not any(key.endswith("bias") for key in read_checkpoint(new.checkpoint)["state_dict"]),
    ),
    "model.vocab_multiple": (
        lambda c: replace(c, model=replace(c.model, vocab_multiple=512)),
        lambda new, old: read_checkpoint(new.checkpoint)["state_dict"]["model.embedding.weight"].shape[0] == 512,
    ),
    "batch.global_batch_tokens": (
        lambda c: replace(c, batch=replace(c.batch, global_batch_tokens=512)),
        lambda new, old: read_metrics(new.metrics)[-1]["tokens"] > 1.5 * read_metrics(old.metrics)[-1]["tokens"],
    ),
    "batch.packing": (
        lambda c: replace(c, batch=replace(c.batch, packing=Packing.pad)),
        lambda new, old: json.loads((new.run_dir / "packing.json").read_text())["packing"] == "pad",
    ),
    "tokenizer.vocab_size": (
        lambda c: replace(c, tokenizer=replace(c.tokenizer, vocab_size=260)),
        lambda new, old: read_checkpoint(new.checkpoint)["model_config"]["vocab_size"] == 260,
    ),
    "data.validation_fraction": (
        lambda c: replace(c, data=replace(c.data, validation_fraction=0.5)),
        lambda new, old: new.val_loss != old.val_loss,
    ),
    "seed": (lambda c: replace(c, seed=5), lambda new, old: new.losses[1] != old.losses[1]),
    "trainer.max_steps": (lambda c: trainer(c, max_steps=4), lambda new, old: new.step == 4),
    "trainer.log_every": (lambda c: trainer(c, log_every=2), lambda new, old: sorted(new.losses) == [2, 3]),
    "trainer.validate_every": (
        lambda c: trainer(c, validate_every=1),
        lambda new, old: sum("val_loss" in row for row in read_metrics(new.metrics)) == 3,
    ),
    "trainer.checkpoint_every": (
        lambda c: trainer(c, checkpoint_every=1, keep_checkpoints=1),
        lambda new, old: len(list_checkpoints(new.run_dir)) == 2,
    ),
    "trainer.precision": (
        lambda c: trainer(c, precision="bf16-mixed"),
        lambda new, old: 0 < abs(new.losses[1] - old.losses[1]) < 0.1,
    ),
    "trainer.peak_tflops": (
        lambda c: trainer(c, peak_tflops=1.0),
        lambda new, old: "mfu" in read_metrics(new.metrics)[-1] and "mfu" not in read_metrics(old.metrics)[-1],
    ),
    "trainer.activation_checkpointing": (
        lambda c: trainer(c, activation_checkpointing=True),
        lambda new, old: new.losses == pytest.approx(old.losses, rel=1e-6),
    ),
    "logger.kind": (
        lambda c: replace(c, logger=LoggerConfig(kind=LoggerKind.tensorboard)),
        lambda new, old: bool(list((new.run_dir / "tensorboard").glob("events*"))),
    ),
}


@pytest.mark.parametrize("key", OVERRIDES)
def test_an_override_takes_effect(key: str, base: RunConfig, plain_run: FitResult) -> None:
    if key == "logger.kind":
        pytest.importorskip("tensorboard")
    change, shows = OVERRIDES[key]
    result = fit(change(replace(base, name=f"override {key}")))
    assert shows(result, plain_run)


def test_the_switches_reach_the_model(base: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    monkeypatch.setattr(GPT, "compile", lambda self: compiled.append(1))
    config = trainer(base, compile=True, activation_checkpointing=True)
    model_config = build.build_model_config(config, 300)
    model = build.build_model(config, model_config, lambda q, *rest: q)
    assert compiled == [1]
    assert model.activation_checkpointing
    assert not build.use_compile(base), "on a CPU off unless asked for"


def test_one_batch_is_overfitted(base: RunConfig) -> None:
    config = trainer(replace(base, name="one"), overfit_one_batch=True, max_steps=25, log_every=1)
    config = replace(config, optim=replace(config.optim, lr=1e-2))
    result = fit(config)
    assert result.losses[25] < 0.5 * result.losses[1]
    once = trainer(replace(config, name="stream"), overfit_one_batch=False, max_steps=2)
    tokens = [row["tokens"] for row in read_metrics(result.metrics)]
    assert {b - a for a, b in pairwise(tokens)} == {tokens[0]}, "the same step each time"
    assert fit(once).losses[1] == result.losses[1], "and it is the stream's first"


def test_a_profile_is_written(base: RunConfig) -> None:
    config = trainer(replace(base, name="profile"), profile=True, max_steps=7)
    run_dir = fit(config).run_dir
    trace = json.loads((run_dir / "profile" / "trace.json").read_text())
    assert any("addmm" in str(event.get("name")) for event in trace["traceEvents"])
    assert "aten::" in (run_dir / "profile" / "table.txt").read_text()


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The loss is NaN in these steps (0-based); one forward pass a step."""
    loss, calls = GPT.loss, iter(range(10**6))

    def poisoned(self: GPT, *args: Any) -> torch.Tensor:
        value = loss(self, *args)
        return value * math.nan if self.training and next(calls) in steps else value

    monkeypatch.setattr(GPT, "loss", poisoned)


def one_micro_batch(config: RunConfig, name: str, **changes: Any) -> RunConfig:
    config = replace(config, name=name, batch=replace(config.batch, global_batch_tokens=128))
    return trainer(config, **changes)


def test_a_step_that_is_not_finite_is_skipped_and_counted(base: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {1, 2})
    result = fit(one_micro_batch(base, "skips", max_steps=5, nonfinite_budget=2))
    rows = read_metrics(result.metrics)
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 2, 2]
    assert [math.isnan(row["loss"]) for row in rows] == [False, True, True, False, False]
    assert result.step == 5, "a skipped step counts: the stream and the schedule go on"
    state = read_checkpoint(result.checkpoint)["optimizer_states"][0]["state"]
    assert {float(entry["step"]) for entry in state.values()} == {3.0}, "the optimiser took three steps"
    assert math.isfinite(result.val_loss or math.nan)


def test_a_run_over_its_budget_stops_with_one_sentence(base: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, set(range(2, 100)))
    config = one_micro_batch(base, "diverged", max_steps=20, nonfinite_budget=3, log_every=4)
    with pytest.raises(ValueError, match=r"stopped at step 8: 6 steps .*trainer\.nonfinite_budget=3; lower optim\.lr"):
        fit(config)
    summary = json.loads((Path(base.run_root) / "diverged" / "summary.json").read_text())
    assert summary["status"] == "failed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: replace(c, model=replace(c.model, vocab_size=100)),
            r"model\.vocab_size must be at least the tokenizer's \d+ ids .*got 100",
        ),
        (lambda c: trainer(c, accelerator="gpu"), r"trainer\.accelerator must be cpu or auto"),
        (
            lambda c: replace(c, optim=replace(c.optim, schedule=Schedule.wsd, decay_steps=3)),
            r"optim\.decay_steps must be at most .*\(2\), got 3",
        ),
        (lambda c: replace(c, run_root=__file__), r"run_root must be a folder that can be written to"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(base: RunConfig, change: Change, message: str) -> None:
    if "accelerator" in message and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = change(replace(base, name="mistake"))
    with pytest.raises(ValueError, match=message):
        fit(config)
    assert not (Path(config.run_root) / "mistake" / "config.yaml").exists()


def test_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.precision must be one of"):
        build.compute_dtype("16-mixed")


RANKS = """
import json, sys, torch
torch.set_num_threads(1)
import train.callbacks.throughput as throughput
from train.checkpoint import from_plain
from train.fit import fit
from train.schema import RunConfig
throughput.sustained_matmul_flops = lambda *args: 1e9
fit(from_plain(RunConfig, json.loads(sys.argv[1])))
"""


def test_two_ranks_learn_what_one_does(base: RunConfig, tmp_path: Path) -> None:
    """Gradients summed over ranks, losses over the whole step: the same curve, and one process that prints."""
    one = fit(trainer(replace(base, name="one rank"), max_steps=4, checkpoint_every=2))
    config = trainer(replace(base, name="two_ranks"), max_steps=4, devices=2, strategy="ddp", checkpoint_every=2)
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(plain(config))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parameters (") == 1
    rows = read_metrics(Path(base.run_root) / "two_ranks" / "metrics.csv")
    assert [row["loss"] for row in rows] == pytest.approx([one.losses[step] for step in range(1, 5)], rel=1e-5)
    assert rows[-1]["val_loss"] == pytest.approx(one.val_loss, rel=1e-5)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in read_metrics(one.metrics)]


def test_what_is_known_at_the_start_is_refused_before_the_data_is_read(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(base, run_root=str(tmp_path), name="early")
    fit(config)

    def no_data(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the data was read first")

    monkeypatch.setattr(build, "build_data", no_data)
    with pytest.raises(ValueError, match="attention=fa2 cannot run here"):
        fit(replace(config, name="other", attention=Attention.fa2))
    longer = replace(config.trainer, max_steps=4)
    with pytest.raises(ValueError, match=r"model\.d_model is 64 and was 32"):
        fit(replace(config, resume="auto", trainer=longer, model=replace(config.model, d_model=64)))
