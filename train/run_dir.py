"""A run's directory `run_root/name`: new, continued or replaced; and the files in it that are not metrics.

The files and their keys are listed in `report.py`. Must not know models or training.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from model.config import COMPUTATION
from train.checkpoint import checkpoint_step, differences, list_checkpoints, newest_readable, plain, read_checkpoint
from train.metrics import cut_back
from train.schema import RunConfig

# What a run writes, and so what overwrite=true removes: never a file that somebody else put there.
_FILES = (
    "config.yaml",
    "tokenizer.json",
    "metrics.csv",
    "environment.json",
    "packing.json",
    "data.json",
    "summary.json",
    "samples.txt",
    "report.html",
    "curves.png",
)
_FOLDERS = ("checkpoints", "profile", "tensorboard", "wandb")


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    run_dir: Path
    path: Path | None = None  # the checkpoint that is continued; None: step 0
    checkpoint: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else int(self.checkpoint["global_step"])


def has_run(run_dir: Path) -> bool:
    return any((run_dir / name).exists() for name in ("config.yaml", "metrics.csv", "checkpoints"))


def plan_start(config: RunConfig, say: Callable[[str], None], first_rank: bool = True) -> Start:
    """Decide from `resume`, `overwrite` and what lies in the run directory; changes nothing there.

    Args:
        first_rank: the other ranks start after the first has begun to write, and take its decision as given.

    Raises:
        ValueError: a run of this name exists and nothing says what to do with it, or the keys contradict each other.
        FileNotFoundError: `resume` is a path without a checkpoint.
    """
    run_dir = Path(config.run_root) / config.name
    exists = has_run(run_dir) and first_rank
    if config.resume is None:
        if exists and not config.overwrite:
            raise ValueError(
                f"{run_dir} holds a run already: resume=auto continues it, name=… starts another, "
                "overwrite=true replaces it"
            )
        return Start(run_dir)
    if config.overwrite:
        raise ValueError(f"overwrite must be false with resume={config.resume}, got true")
    if config.resume == "auto":
        return _newest(run_dir, say)
    path = _resume_path(Path(config.resume))
    elsewhere = path.resolve().parent.parent != run_dir.resolve()
    if exists and elsewhere:
        raise ValueError(
            f"{run_dir} holds another run than resume={config.resume}: name=… continues it elsewhere, "
            "resume=auto goes on with the one that is there"
        )
    return Start(run_dir, path, read_checkpoint(path))


def _newest(run_dir: Path, say: Callable[[str], None]) -> Start:
    found = newest_readable(run_dir, say)
    if found is None:
        if list_checkpoints(run_dir):
            raise ValueError(f"resume=auto: no checkpoint in {run_dir} is readable; overwrite=true starts anew")
        say(f"resume: no checkpoint in {run_dir}, starting at step 0")
        return Start(run_dir)
    return Start(run_dir, *found)


def _resume_path(path: Path) -> Path:
    if path.is_dir():
        found = list_checkpoints(path) or list_checkpoints(path.parent)
        if found:
            return found[0]
    if not path.is_file():
        raise FileNotFoundError(f"resume must be null, auto or a checkpoint's path; there is none at {path}")
    return path


def check_same(checkpoint: dict[str, Any], identity: dict[str, Any], say: Callable[[str], None]) -> None:
    """A checkpoint goes on only with the model, tokenizer and data that it was made with.

    Args:
        identity: `run_config`, `model_config` and the fingerprints of the run that wants to continue.

    Raises:
        ValueError: names what differs.
    """
    changed = differences(checkpoint["run_config"], identity["run_config"])
    for part, decided_by in (("tokenizer", ("tokenizer.", "data.")), ("data", ("data.",))):
        old, new = checkpoint[f"{part}_fingerprint"], identity[f"{part}_fingerprint"]
        if old != new:
            # a tokenizer trained here depends on the text too
            keys = [key for key in changed if key.startswith(decided_by)]
            why = "".join(f", {key} is {changed[key][1]!r} and was {changed[key][0]!r}" for key in keys)
            raise ValueError(f"resume: the {part} differs from the checkpoint's: fingerprint {new}, was {old}{why}")
    _refuse_other_shape(differences(checkpoint["model_config"], identity["model_config"]))
    # The position in the stream means something only in the stream it was taken from.
    for key, (before, now) in changed.items():
        if key == "seed" or key.startswith("batch."):
            raise ValueError(f"resume: {key} differs from the checkpoint's, is {now!r} and was {before!r}")
    _say_changes(changed, say)


def check_same_shape(checkpoint: dict[str, Any], run_config: dict[str, Any]) -> None:
    """`check_same` for what is known before the data is prepared: every key of the model but its vocabulary.

    Raises:
        ValueError: names the keys that differ.
    """
    shape = differences(checkpoint["run_config"]["model"], run_config["model"])
    _refuse_other_shape({key: values for key, values in shape.items() if key != "vocab_size"})


def _refuse_other_shape(shape: dict[str, tuple[Any, Any]]) -> None:
    listed = ", ".join(
        f"model.{key} is {new!r} and was {old!r}" for key, (old, new) in shape.items() if key not in COMPUTATION
    )
    if listed:
        raise ValueError(f"resume: the model differs from the checkpoint's: {listed}")


def _say_changes(changed: dict[str, tuple[Any, Any]], say: Callable[[str], None]) -> None:
    if "trainer.max_steps" in changed:
        old, new = changed.pop("trainer.max_steps")
        say(f"resume: trainer.max_steps is {new} and was {old}; the learning rate follows the schedule of {new} steps")
    silent = ("resume", "overwrite", "name", "run_root", "dry_run", "data.", "model.")
    said = [f"model.{key}" for key in COMPUTATION]
    listed = [
        f"{key} {old!r} → {new!r}" for key, (old, new) in changed.items() if key in said or not key.startswith(silent)
    ]
    if listed:
        say(f"resume: changed since the checkpoint: {', '.join(listed)}")


def open_directory(start: Start, config: RunConfig, say: Callable[[str], None]) -> None:
    """Make the directory ready to be written to: empty for a new run, cut back to the checkpoint for a continued one.

    Raises:
        ValueError: the directory cannot be made or written to.
    """
    run_dir = start.run_dir
    if start.path is None:
        _remove_run(run_dir)
    else:
        gone = cut_back(run_dir / "metrics.csv", start.step)
        say(f"resume: {start.path}, step {start.step}" + (f"; {gone} newer rows of metrics dropped" if gone else ""))
        for path in list_checkpoints(run_dir):
            if checkpoint_step(path) > start.step:
                # Otherwise the next resume=auto would jump ahead to a state that this run never had.
                path.unlink()
                say(f"resume: {path.name} is newer than the step resumed from, removed")
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
    (run_dir / "config.yaml").write_text(f"# The resolved configuration of this run.\n{text}", encoding="utf-8")


def check_writable(run_dir: Path) -> None:
    """Make the run's directory, before any work is done.

    Raises:
        ValueError: it cannot be made or written to.
    """
    try:
        probe_folder(run_dir)
    except OSError as error:
        raise ValueError(
            f"run_root must be a folder that can be written to, got {run_dir} ({error.strerror})"
        ) from error


def probe_folder(folder: Path) -> None:
    """Make a folder and a file in it; an OSError where that is not possible."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


_IN_USE = "{} is in use by another process that trains there: wait for it, or name=… starts another"


@contextmanager
def locked(run_dir: Path, in_use: str = _IN_USE) -> Iterator[None]:
    """Holds the run's directory for this process: two runs in one would mix metrics and remove each other's files.

    The system releases the lock however the process ends, and a forked worker does not inherit it.

    Args:
        in_use: what is said where another process holds it.

    Raises:
        ValueError: another process holds this directory.
    """
    with (run_dir / ".lock").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(in_use.format(run_dir)) from None
            # otherwise a file system without locks: the run goes on without one
        yield


def _remove_run(run_dir: Path) -> None:
    for name in _FILES:
        (run_dir / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(run_dir / name, ignore_errors=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace a JSON file whole; NaN and infinity become null."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(_finite(values), indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
