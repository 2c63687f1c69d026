"""What a run ran on, for environment.json: versions, device, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import torch


def environment(device: torch.device, **resolved: Any) -> dict[str, Any]:
    """One flat object; `resolved` adds what was decided (attention, precision, compile)."""
    gpu = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lightning": lightning.__version__,
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "hostname": socket.gethostname(),
        "commit": commit(),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        **resolved,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str | None:
    """The checkout's commit, with `+changes` where tracked files differ from it; None outside a repository.

    `FA2_COMMIT` names it for a copy of the files without their history.
    """
    if named := os.environ.get("FA2_COMMIT"):
        return named
    root = str(Path(__file__).resolve().parent.parent)
    head = _output("git", "-C", root, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _output("git", "-C", root, "status", "--porcelain", "-uno") else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
