"""metrics.csv: every bit of a number, cut back on resume, torn lines left out; the other loggers beside it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from train.metrics import CsvLogger, build_loggers, cut_back, last_value, read_metrics, wandb_run_id
from train.report import METRICS_COLUMNS
from train.schema import LoggerConfig, LoggerKind


def written(path: Path, steps: int) -> CsvLogger:
    logger = CsvLogger(path)
    for step in range(1, steps + 1):
        logger.log_metrics({"loss": step / 3, "tokens": step * 10}, step)
    return logger


def test_numbers_come_back_bit_by_bit_and_empty_cells_do_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    written(path, 2).log_metrics({"val_loss": math.nan}, 3)
    assert path.read_text().splitlines()[0] == ",".join(METRICS_COLUMNS)
    rows = read_metrics(path)
    assert rows[:2] == [{"step": 1, "loss": 1 / 3, "tokens": 10}, {"step": 2, "loss": 2 / 3, "tokens": 20}]
    assert set(rows[2]) == {"step", "val_loss"}
    assert last_value(rows, "loss") == 2 / 3
    assert last_value(rows, "val_loss") is None, "NaN is no last value"


def test_an_unknown_column_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no columns"):
        CsvLogger(tmp_path / "metrics.csv").log_metrics({"accuracy": 1.0}, 1)


def test_cut_back_keeps_the_rows_up_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    logger = written(path, 5)
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write("6,60,1.9")  # the process was killed inside this line
    assert len(read_metrics(path)) == 5
    assert cut_back(path, 3) == 2
    assert path.read_text().splitlines() == before[:4]
    logger.log_metrics({"loss": 9.0}, 4)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    assert cut_back(tmp_path / "none.csv", 3) == 0


def test_offline_wandb_keeps_its_run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = LoggerConfig(kind=LoggerKind.wandb, project="p")
    loggers = build_loggers(config, tmp_path, "run", {"seed": 1}, None)
    run_id = wandb_run_id(loggers)
    assert run_id
    loggers[1].log_metrics({"loss": 1.0}, 1)
    wandb.finish()
    again = build_loggers(config, tmp_path, "run", {"seed": 1}, run_id)
    assert wandb_run_id(again) == run_id
    assert again[1].experiment.id == run_id
    wandb.finish()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1


def test_tensorboard_writes_into_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    loggers = build_loggers(LoggerConfig(kind=LoggerKind.tensorboard), tmp_path, "run", {"seed": 1}, None)
    loggers[1].log_metrics({"loss": 1.0}, 1)
    loggers[1].finalize("success")
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert wandb_run_id(loggers) is None


def test_csv_alone_by_default(tmp_path: Path) -> None:
    assert [type(logger) for logger in build_loggers(LoggerConfig(), tmp_path, "run", {}, None)] == [CsvLogger]
