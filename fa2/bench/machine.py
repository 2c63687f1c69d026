"""What a record says about where it was made: GPU, driver, clocks, power, torch, CUDA, commit. Changes nothing."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
_QUERY = {"driver": "driver_version", "sm_clock": "clocks.sm", "power": "power.draw", "temperature": "temperature.gpu"}


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def gpu_state() -> dict[str, str]:
    """Driver, clocks, power and temperature as nvidia-smi gives them; empty where there is none."""
    text = _said("nvidia-smi", f"--query-gpu={','.join(_QUERY.values())}", "--format=csv,noheader")
    if not text:
        return {}
    fields = [field.strip() for field in text.splitlines()[0].split(",")]
    return dict(zip(_QUERY, fields, strict=True)) if len(fields) == len(_QUERY) else {}


def commit() -> str | None:
    """The commit of the checkout, with `+changes` where fa2/ differs from it; `FA2_COMMIT` names it for a copy of the
    files without their history; else None."""
    if named := os.environ.get("FA2_COMMIT"):
        return named
    head = _said("git", "rev-parse", "--short=12", "HEAD")
    dirty = _said("git", "status", "--porcelain", "--untracked-files=no", "--", "fa2")
    return f"{head}+changes" if head and dirty else head


def describe(device: str) -> dict[str, Any]:
    from fa2 import nvcc

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "sources": nvcc.source_key(),
    }
    if not device.startswith("cuda"):
        return {**facts, "device": device}
    facts |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **gpu_state()}
    if torch.backends.cudnn.is_available():
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts
