"""reproduce.json: what was measured, where and by which invocation; written whole after every cell.

    {"machine": {...}, "invocations": [{"id", "command", "date"}, ...], "cells": [{"row", "data", "attention",
     "invocation", "status", ...}, ...]}

A record is of one machine and one commit: other ones are refused. A cell names its invocation, because figures of two
invocations never make a ratio.
"""

from __future__ import annotations

import datetime
import json
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from train.environment import environment
from train.run_dir import probe_folder, write_json

Record = dict[str, Any]
# What must agree before figures lie in one record.
IDENTITY = ("gpu", "driver", "torch", "cuda", "cudnn", "cpu", "commit")
# Of two that write one record, the later would lose the other's cells.
IN_USE = "output={} is in use by another train.reproduce: wait for it, two at once would slow each other"


def describe_machine(where: torch.device) -> Record:
    """The machine's part of the record, without its name."""
    facts = environment(where)
    found = {key: facts[key] for key in ("gpu", "driver", "torch", "cuda", "python", "lightning", "cpu", "commit")}
    on_gpu = where.type == "cuda"
    return {
        **found,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "memory_bytes": device_memory(where),
        "clocks": _clocks(where) if on_gpu else None,
    }


def device() -> torch.device:
    """The one that is measured."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_memory(where: torch.device) -> int | None:
    """Bytes of the GPU; None for a CPU, whose memory is not checked."""
    return torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else None


def _clocks(where: torch.device) -> str | None:
    """The largest clocks that the GPU allows, and its power limit, as nvidia-smi says them."""
    uuid = f"GPU-{torch.cuda.get_device_properties(where).uuid}"
    query = "--query-gpu=clocks.max.sm,clocks.max.memory,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", uuid, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def open_folder(output: str) -> Path:
    """The folder of the record, made if it is not there: before the first cell, not after minutes of measuring.

    Raises:
        ValueError: it cannot be made or written to.
    """
    folder = Path(output)
    try:
        probe_folder(folder)
    except OSError as error:
        raise ValueError(f"output must be a folder that can be written to, got {output} ({error.strerror})") from error
    return folder


def open_record(path: Path, machine: Record | None, merge: Iterable[str]) -> Record:
    """The record at `path`, or a fresh one, with the cells of those in `merge`; of equal cells the last one stays.

    Args:
        machine: this one's description; None, where nothing will be measured, takes the first record's.

    Raises:
        ValueError: one of them is of another machine or commit, or is no record.
    """
    record: Record = {"machine": machine, "invocations": [], "cells": []}
    for other in [*([path] if path.exists() else []), *map(Path, merge)]:
        read = _read(other)
        if record["machine"] is None:
            record["machine"] = read["machine"]
        _check_same_machine(record["machine"], read["machine"], other)
        known = {invocation["id"] for invocation in record["invocations"]}
        record["invocations"] += [i for i in read["invocations"] if i["id"] not in known]
        for cell in read["cells"]:
            put(record, cell)
    if record["machine"] is None:
        raise ValueError("merge must name records where rows is empty: there is nothing to measure and nothing to join")
    return record


def _read(path: Path) -> Record:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"merge must be of records of train.reproduce, {path} is no JSON ({error})") from error
    if not isinstance(record, dict) or not {"machine", "invocations", "cells"} <= set(record):
        raise ValueError(f"merge must be of records of train.reproduce, {path} is none")
    return record


def _check_same_machine(ours: Record, theirs: Record, path: Path) -> None:
    if ours is theirs:
        return
    if ours.get("commit") is None:
        raise ValueError(
            f"output must be a fresh folder where no commit is known, {path} holds a record: FA2_COMMIT=… names the "
            "commit of a copy without its history"
        )
    different = [key for key in IDENTITY if ours.get(key) != theirs.get(key)]
    if different:
        listed = ", ".join(f"{key} {theirs.get(key)!r} there and {ours.get(key)!r} here" for key in different)
        raise ValueError(
            f"records must be of one machine and commit to be joined, {path} has {listed}; output=… starts another"
        )


def begin_invocation(record: Record) -> str:
    """Add this command to the record, without the folder that it writes to; returns its id, which its cells carry."""
    identity = secrets.token_hex(4)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    command = shlex.join(["python", *(word for word in sys.orig_argv[1:] if not word.startswith("output="))])
    record["invocations"].append({"id": identity, "command": command, "date": date})
    return identity


def put(record: Record, cell: Record) -> None:
    """Add a cell. A measured one takes the place of an earlier one, whatever that says; another only of its like."""
    key = cell_key(cell)
    for i, old in enumerate(record["cells"]):
        if cell_key(old) == key:
            if cell["status"] == "ok" or old["status"] != "ok":
                record["cells"][i] = cell
            return
    record["cells"].append(cell)


def cell_key(cell: Record) -> tuple[Any, ...]:
    """What makes two cells the same: the row, its data, attention and micro-batch, and what was overridden."""
    return (cell["row"], cell["data"], cell["attention"], cell["micro_batch_tokens"], tuple(cell["overrides"]))


def write(record: Record, path: Path) -> None:
    """Replace the file whole, so that a kill leaves the cells before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
