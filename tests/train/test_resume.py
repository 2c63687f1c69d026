"""An interrupted run goes on bit by bit as if nothing had happened: after a crash, kill -9, SIGTERM, a torn file."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.config import BatchConfig, DataConfig, Source, TokenizerConfig
from model.config import GPTConfig
from train.callbacks.signals import Signals
from train.checkpoint import checkpoint_path, list_checkpoints, plain, read_checkpoint
from train.fit import fit
from train.metrics import read_metrics
from train.module import GPTModule
from train.schema import OptimConfig, RunConfig, TrainerConfig

STEPS = 24
EVERY = 4  # steps between checkpoints
ROOT = Path(__file__).resolve().parents[2]

# The child trains what it is told to, slowly enough that a signal meets it in the middle.
CHILD = """
import json, sys, time, torch
torch.set_num_threads(int(sys.argv[2]))
import train.callbacks.throughput as throughput
from train.checkpoint import from_plain
from train.fit import fit
from train.module import GPTModule
from train.schema import RunConfig
throughput.sustained_matmul_flops = lambda *args: 1e9
step = GPTModule.training_step
def slow_step(self, item, batch_idx):
    time.sleep(0.1)
    step(self, item, batch_idx)
GPTModule.training_step = slow_step
fit(from_plain(RunConfig, json.loads(sys.argv[1])))
"""


class Crash(Exception):
    """What a run dies of here."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 14 steps of documents: a run of 24 crosses the end of an epoch."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["for", "in", "while", "return", "import", "def", "class", "yield"]
    for i in range(40):
        document = " ".join(draw.choice(words) for _ in range(draw.randint(20, 200)))
        (folder / f"{i}.txt").write_text(document, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def base(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Dropout makes the losses depend on the random number generators too."""
    folder = tmp_path_factory.mktemp("runs")
    return RunConfig(
        name="whole",
        run_root=str(folder),
        model=GPTConfig(n_layer=2, d_model=32, nheads_q=2, max_positions=64, dropout=0.2),
        data=DataConfig(
            source=Source.files,
            paths=[str(text)],
            cache_dir=str(folder / "cache"),
            validation_fraction=0.2,
            processes=1,
        ),
        tokenizer=TokenizerConfig(vocab_size=300),
        batch=BatchConfig(context=64, micro_batch_tokens=128, global_batch_tokens=256),
        optim=OptimConfig(warmup_steps=3),
        trainer=TrainerConfig(
            max_steps=STEPS,
            accelerator="cpu",
            log_every=1,
            validate_every=6,
            checkpoint_every=EVERY,
            progress_bar=False,
            sample_tokens=0,
        ),
    )


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """No second of matrix products and no pictures in each of these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.callbacks.throughput.sustained_matmul_flops", lambda *args: 1e9)
        patch.setattr("train.report.write_report", lambda run_dir: None)
        yield


@pytest.fixture(scope="module")
def whole(base: RunConfig, _quick: None) -> list[dict[str, float]]:
    """Rows of the run that nothing interrupts."""
    return rows_of(fit(base).run_dir)


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """Everything in metrics.csv that is no measurement of time."""
    timing = ("time", "tokens_per_s", "mfu", "mfu_exact", "gemm_util")
    return [{k: v for k, v in row.items() if k not in timing} for row in read_metrics(run_dir / "metrics.csv")]


def named(base: RunConfig, name: str, **changes: Any) -> RunConfig:
    return replace(base, name=name, **changes)


def crash_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """The process dies in the middle of a step (0-based), as far as the run directory can tell."""
    training_step = GPTModule.training_step

    def dying_step(self: GPTModule, item: Any, batch_idx: int) -> None:
        if self.global_step == step:
            raise Crash
        training_step(self, item, batch_idx)

    patch.setattr(GPTModule, "training_step", dying_step)


def crashed(config: RunConfig, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, step)
        with pytest.raises(Crash):
            fit(config)


def start_child(config: RunConfig) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(plain(config)), str(torch.get_num_threads())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_for_rows(config: RunConfig, count: int, child: subprocess.Popen[str]) -> None:
    metrics = Path(config.run_root) / config.name / "metrics.csv"
    deadline = time.monotonic() + 120
    while len(read_metrics(metrics)) < count:
        assert child.poll() is None, f"the child ended early: {child.communicate()[0]}"
        assert time.monotonic() < deadline, "the child makes no progress"
        time.sleep(0.02)


def test_the_run_crosses_an_epoch_end_and_draws_dropout(base: RunConfig, whole: list[dict[str, float]]) -> None:
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    tokens = [row["tokens"] for row in whole]
    epoch = _epoch_tokens(base)
    assert tokens[10] < epoch < tokens[17], f"the epoch of {epoch} tokens ends among the interrupted steps: {tokens}"
    again = rows_of(fit(named(base, "other_seed", seed=base.seed + 1)).run_dir)
    assert again[-1]["loss"] != whole[-1]["loss"]


def _epoch_tokens(config: RunConfig) -> int:
    from data.prepare import prepare

    train = prepare(config.data, config.tokenizer, say=lambda line: None, progress=False).train
    return int(train.lengths.sum()) - len(train)


# 12 is inside the first epoch and its checkpoint before the end of it; the steps resumed cross that end.
@pytest.mark.parametrize("step", [12, *random.Random(20).sample(range(1, STEPS), 2)])
def test_a_crashed_run_goes_on_bit_identically(base: RunConfig, whole: list[dict[str, float]], step: int) -> None:
    config = named(base, f"crash_{step}")
    crashed(config, step)
    saved = step // EVERY * EVERY
    newest = list_checkpoints(Path(base.run_root) / config.name)[:1]
    assert newest == ([checkpoint_path(Path(base.run_root) / config.name, saved)] if saved else [])
    result = fit(replace(config, resume="auto"))
    assert result.step == STEPS
    assert rows_of(result.run_dir) == whole


def test_a_run_with_weight_copies_goes_on_bit_identically(base: RunConfig) -> None:
    trainer = replace(base.trainer, precision="bf16-mixed", weight_copies=True)
    expected = rows_of(fit(named(base, "copies", trainer=trainer)).run_dir)
    config = named(base, "copies_crash", trainer=trainer)
    crashed(config, 13)
    assert rows_of(fit(replace(config, resume="auto")).run_dir) == expected


def test_a_compiled_run_goes_on_bit_identically(base: RunConfig) -> None:
    """Though it compiles, in its first step, with the random state of the checkpoint; and draws dropout in graphs."""
    trainer = replace(base.trainer, compile=True, max_steps=10)
    expected = rows_of(fit(named(base, "compiled", trainer=trainer)).run_dir)
    config = named(base, "compiled_crash", trainer=trainer)
    crashed(config, 6)
    assert rows_of(fit(replace(config, resume="auto")).run_dir) == expected


def test_kill_9_loses_at_most_one_interval(base: RunConfig, whole: list[dict[str, float]]) -> None:
    config = named(base, "killed")
    child = start_child(config)
    wait_for_rows(config, EVERY + 2, child)
    child.kill()
    child.wait()
    run_dir = Path(config.run_root) / config.name
    reached = len(read_metrics(run_dir / "metrics.csv"))
    assert EVERY <= reached < STEPS, "the kill came in the middle"
    newest = list_checkpoints(run_dir)[0]
    assert read_checkpoint(newest)["global_step"] >= reached - EVERY
    assert rows_of(fit(replace(config, resume="auto")).run_dir) == whole


def test_sigterm_saves_the_step_and_exits(base: RunConfig, whole: list[dict[str, float]]) -> None:
    config = named(base, "terminated")
    child = start_child(config)
    wait_for_rows(config, 2, child)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert "resume=auto continues" in output
    run_dir = Path(config.run_root) / config.name
    rows = read_metrics(run_dir / "metrics.csv")
    assert len(rows) < STEPS
    assert list_checkpoints(run_dir)[0] == checkpoint_path(run_dir, int(rows[-1]["step"])), "no step is lost"
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert rows_of(fit(replace(config, resume="auto")).run_dir) == whole


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_within_a_log_interval_loses_nothing(base: RunConfig, signum: signal.Signals) -> None:
    """The half interval's sum travels in the checkpoint: the row at its end is the uninterrupted run's."""
    sparse = replace(base.trainer, log_every=5, validate_every=0)
    expected = rows_of(fit(named(base, f"sparse_{signum}", trainer=sparse)).run_dir)
    config = named(base, f"inside_{signum}", trainer=sparse)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    training_step = GPTModule.training_step

    def signalled(self: GPTModule, item: Any, batch_idx: int) -> None:
        if self.global_step == 6:
            os.kill(os.getpid(), signum)
        training_step(self, item, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTModule, "training_step", signalled)
        with pytest.raises(SystemExit) as exit_:
            fit(config)
    assert exit_.value.code == 128 + signum
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert list_checkpoints(Path(config.run_root) / config.name)[0].name == "step_000007.ckpt"
    assert rows_of(fit(replace(config, resume="auto")).run_dir) == expected


def test_a_second_sigint_aborts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals(SimpleNamespace(), 1, print)  # type: ignore[arg-type]
    handlers: dict[int, Any] = {}
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("train.callbacks.signals.signal.signal", lambda signum, to: handlers.update({signum: to}))
    monkeypatch.setattr("train.callbacks.signals.os.kill", lambda pid, signum: sent.append((pid, signum)))
    signals.on_train_start(SimpleNamespace(world_size=1), SimpleNamespace())  # type: ignore[arg-type]
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert sent == [], "an impatient scheduler does not lose the checkpoint"
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert handlers[signal.SIGINT] == signal.SIG_DFL
    assert sent == [(os.getpid(), signal.SIGINT)]


def test_a_torn_newest_file_falls_to_the_one_before(
    base: RunConfig, whole: list[dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    config = named(base, "torn")
    crashed(config, 10)
    run_dir = Path(config.run_root) / config.name
    newest = checkpoint_path(run_dir, 8)
    newest.write_bytes(newest.read_bytes()[:-1000])
    capsys.readouterr()
    result = fit(replace(config, resume="auto"))
    output = capsys.readouterr().out
    assert output.count("unreadable") == 1
    assert f"step {4}" in output
    assert rows_of(result.run_dir) == whole


def test_a_save_that_is_cut_off_leaves_the_older_checkpoint(base: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill during the write: what is under the final name is whole, whatever the write had reached."""
    config = named(base, "cut_off")
    save = torch.save

    def cut_off_save(value: Any, file: Any) -> None:
        if value["global_step"] == 8:
            file.write(b"PK half a checkpoint")
            raise Crash
        save(value, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", cut_off_save)
        with pytest.raises(Crash):
            fit(config)
    run_dir = Path(config.run_root) / config.name
    assert [path.name for path in list_checkpoints(run_dir)] == ["step_000004.ckpt"]
    assert fit(replace(config, resume="auto")).step == STEPS
    assert not list((run_dir / "checkpoints").glob("*.partial")), "the next save tidies up"


def test_a_complete_run_says_so_and_a_longer_one_goes_on(
    base: RunConfig, whole: list[dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    result = fit(replace(base, resume="auto"))
    assert "is complete" in capsys.readouterr().out
    assert (result.step, result.losses[STEPS]) == (STEPS, whole[-1]["loss"])
    config = named(base, "longer")
    fit(replace(config, trainer=replace(base.trainer, max_steps=8)))
    capsys.readouterr()
    longer = fit(replace(config, trainer=replace(base.trainer, max_steps=10), resume="auto"))
    assert "trainer.max_steps is 10 and was 8" in capsys.readouterr().out
    assert longer.step == 10
    # The rate is that of a run of 10 steps from here on.
    assert read_metrics(longer.metrics)[-1]["lr"] == pytest.approx(base.optim.lr * base.optim.min_lr_ratio)


def test_going_back_to_an_older_checkpoint_drops_what_came_after(
    base: RunConfig, whole: list[dict[str, float]]
) -> None:
    config = named(base, "back", trainer=replace(base.trainer, keep_checkpoints=9))
    crashed(config, 14)
    run_dir = Path(config.run_root) / config.name
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 7)
        with pytest.raises(Crash):
            fit(replace(config, resume=str(checkpoint_path(run_dir, 4))))
    assert [row["step"] for row in read_metrics(run_dir / "metrics.csv")] == [1, 2, 3, 4, 5, 6, 7]
    assert list_checkpoints(run_dir) == [checkpoint_path(run_dir, 4)]
    assert rows_of(fit(replace(config, resume="auto")).run_dir) == whole


def test_a_checkpoint_goes_on_under_another_name(base: RunConfig, whole: list[dict[str, float]]) -> None:
    origin = Path(base.run_root) / "whole"
    older = list_checkpoints(origin)[1]
    result = fit(named(base, "fork", resume=str(older)))
    assert result.run_dir.name == "fork"
    step = read_checkpoint(older)["global_step"]
    assert rows_of(result.run_dir) == [row for row in whole if row["step"] > step]


def test_an_existing_run_is_not_touched_unless_told(base: RunConfig, whole: list[dict[str, float]]) -> None:
    with pytest.raises(ValueError, match=r"holds a run already.*resume=auto.*name=.*overwrite=true"):
        fit(base)
    with pytest.raises(ValueError, match="overwrite must be false with resume=auto"):
        fit(replace(base, resume="auto", overwrite=True))
    config = named(base, "replaced", trainer=replace(base.trainer, max_steps=3))
    run_dir = fit(config).run_dir
    (run_dir / "notes.txt").write_text("mine")
    fit(replace(config, overwrite=True, trainer=replace(base.trainer, max_steps=4)))
    assert [row["step"] for row in read_metrics(run_dir / "metrics.csv")] == [1, 2, 3, 4]
    assert (run_dir / "notes.txt").read_text() == "mine", "a file that is not the run's stays"


def test_resume_paths_that_do_not_work(base: RunConfig, tmp_path: Path) -> None:
    missing = tmp_path / "step_000001.ckpt"
    with pytest.raises(FileNotFoundError, match=r"resume must be .* there is none at"):
        fit(named(base, "n", resume=str(missing)))
    missing.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="is unreadable"):
        fit(named(base, "n", resume=str(missing)))
    torch.save({"state_dict": {}}, missing)
    with pytest.raises(ValueError, match="must be one written by `python -m train`"):
        fit(named(base, "n", resume=str(missing)))


def test_auto_without_a_run_starts_at_step_0(base: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(named(base, "fresh", resume="auto", trainer=replace(base.trainer, max_steps=3)))
    assert "starting at step 0" in capsys.readouterr().out
    assert result.step == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"d_model": 64}}, r"model differs.*model\.d_model is 64 and was 32"),
        ({"tokenizer": {"vocab_size": 280}}, r"tokenizer differs.*tokenizer\.vocab_size is 280"),
        ({"data": {"max_documents": 30}}, r"data differs.*data\.max_documents is 30 and was None"),
        ({"batch": {"global_batch_tokens": 128}}, r"batch\.global_batch_tokens differs.*is 128 and was 256"),
        ({"seed": 7}, r"seed differs.*is 7 and was"),
    ],
)
def test_what_must_not_change_is_named(
    base: RunConfig, whole: list[dict[str, float]], changes: dict[str, Any], message: str
) -> None:
    values = {k: replace(getattr(base, k), **v) if isinstance(v, dict) else v for k, v in changes.items()}
    if "data" in values:  # the same tokenizer over other documents
        tokenizer = Path(base.run_root) / "whole" / "tokenizer.json"
        from data.config import TokenizerKind

        values["tokenizer"] = TokenizerConfig(kind=TokenizerKind.file, path=str(tokenizer))
    with pytest.raises(ValueError, match=message):
        fit(replace(base, resume="auto", trainer=replace(base.trainer, max_steps=STEPS + 1), **values))
    assert rows_of(Path(base.run_root) / "whole") == whole, "a refused resume leaves the run as it was"


def test_a_changed_rate_is_said_and_used(base: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = named(base, "rate")
    crashed(config, 6)
    optim = replace(base.optim, lr=1e-3, weight_decay=0.0, beta2=0.9)
    capsys.readouterr()
    result = fit(replace(config, resume="auto", optim=optim))
    assert "optim.lr 0.003 → 0.001" in capsys.readouterr().out
    rows = {int(row["step"]): row["lr"] for row in read_metrics(result.metrics)}
    assert rows[5] <= 1e-3
    assert rows[4] > 1e-3
    groups = read_checkpoint(result.checkpoint)["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]
    assert {tuple(group["betas"]) for group in groups} == {(0.9, 0.9)}


def test_how_the_model_is_computed_may_change_and_a_checkpoint_may_not_know_it(
    base: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was written before these keys were there goes on too."""
    config = named(base, "computed")
    crashed(config, 6)
    path = list_checkpoints(Path(base.run_root) / "computed")[0]
    checkpoint = read_checkpoint(path)
    for model in (checkpoint["run_config"]["model"], checkpoint["model_config"]):
        del model["residual_fp32"], model["logits_fp32"]
    torch.save(checkpoint, path.with_suffix(".new"))  # not over the file, which is mapped into memory
    path.with_suffix(".new").replace(path)
    capsys.readouterr()
    result = fit(replace(config, resume="auto", model=replace(base.model, logits_fp32=False, loss_chunk_tokens=64)))
    assert result.step == STEPS
    said = capsys.readouterr().out
    assert "model.residual_fp32 None → False" in said
    assert "model.logits_fp32 None → False" in said
    assert "model.loss_chunk_tokens" in said
