"""Loggers of a run: `metrics.csv` always, wandb or tensorboard beside it.

One row a step that has something to say; its columns are defined in `report.py`, which reads them. A resumed run cuts
the file back to its checkpoint's step first, so that no step stands there twice.
"""

from __future__ import annotations

import csv
import math
import os
import secrets
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from train.report import METRICS_COLUMNS
from train.schema import LoggerConfig, LoggerKind

_INTEGERS = ("step", "tokens", "skipped_steps")


class CsvLogger(Logger):
    """Appends one row a call to `metrics.csv`; a value that was not measured is an empty cell."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        unknown = sorted(set(metrics) - set(METRICS_COLUMNS))
        assert not unknown, f"metrics.csv has no columns {unknown}"
        new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, METRICS_COLUMNS)
            if new:
                writer.writeheader()
            # repr keeps every bit of a float: two runs are compared by their rows.
            writer.writerow({"step": step, **{key: _cell(value) for key, value in metrics.items()}})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration is in config.yaml already."""


def _cell(value: float | int | None) -> str:
    return "" if value is None else repr(value)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics.csv without their empty cells; a last line torn by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if None in row or None in row.values():
                continue
            try:
                rows.append({k: int(v) if k in _INTEGERS else float(v) for k, v in row.items() if v != ""})
            except ValueError:
                continue
    return [row for row in rows if "step" in row]


def cut_back(path: Path, step: int) -> int:
    """Keep the rows up to and including `step`; returns how many went. The file is replaced whole."""
    rows = read_metrics(path)
    kept = [row for row in rows if row["step"] <= step]
    if path.exists():
        temporary = path.with_name(f".{path.name}.partial")
        temporary.unlink(missing_ok=True)
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, METRICS_COLUMNS)
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()} for row in kept)
        os.replace(temporary, path)
    return len(rows) - len(kept)


def last_value(rows: list[dict[str, float]], column: str) -> float | None:
    """The newest finite value of a column."""
    return next((row[column] for row in reversed(rows) if math.isfinite(row.get(column, math.nan))), None)


def build_loggers(
    config: LoggerConfig, run_dir: Path, name: str, run_config: dict[str, Any], wandb_run_id: str | None
) -> list[Logger]:
    """The run's loggers, `metrics.csv` first.

    Args:
        wandb_run_id: of the run that is continued; None begins a new one.
    """
    loggers: list[Logger] = [CsvLogger(run_dir / "metrics.csv")]
    if config.kind is LoggerKind.wandb:
        loggers.append(_wandb_logger(config, run_dir, name, wandb_run_id))
    elif config.kind is LoggerKind.tensorboard:
        loggers.append(_tensorboard_logger(run_dir))
    for logger in loggers[1:]:
        logger.log_hyperparams(run_config)
    return loggers


def _wandb_logger(config: LoggerConfig, run_dir: Path, name: str, run_id: str | None) -> Logger:
    try:
        import wandb
        from lightning.pytorch.loggers import WandbLogger
    except ImportError as error:
        raise ValueError("logger.kind=wandb needs the package wandb: pip install wandb") from error
    return WandbLogger(
        name=name,
        save_dir=run_dir,
        project=config.project,
        entity=config.entity,
        offline=config.offline,
        id=run_id or secrets.token_hex(4),
        settings=wandb.Settings(silent=True),
        # resuming needs the server; an offline run keeps its id, and `wandb sync` joins the parts under it
        resume=None if config.offline else "allow",
    )


def _tensorboard_logger(run_dir: Path) -> Logger:
    try:
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(save_dir=run_dir, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise ValueError("logger.kind=tensorboard needs the package tensorboard: pip install tensorboard") from error


def wandb_run_id(loggers: list[Logger]) -> str | None:
    """The id under which a continued run goes on, to be kept in the checkpoint."""
    return next((str(logger.version) for logger in loggers if type(logger).__name__ == "WandbLogger"), None)
