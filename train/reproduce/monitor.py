"""Clocks, power, temperature and throttling of the GPU while something runs on it, as nvidia-smi samples them."""

from __future__ import annotations

import statistics
import subprocess
import threading
from collections.abc import Iterable, Sequence
from typing import Any

_SECONDS = 1.0  # between two samples
# The field for the reasons of a lowered clock was renamed in driver 535; older ones know the old name alone.
_FIELDS = ("clocks.sm", "power.draw", "temperature.gpu", "power.limit")
_REASONS_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Source: nvml.h, nvmlClocksEventReason*. Idle (0x1) and a chosen application clock (0x2) are no throttling.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


class Monitor:
    """Between `start` and `stop` a thread asks nvidia-smi once a second; silent where there is none.

    Args:
        gpu: what nvidia-smi calls the GPU (`GPU-<uuid>`); None watches nothing.
    """

    def __init__(self, gpu: str | None) -> None:
        self.gpu = gpu
        self._lines: list[str] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.gpu is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="nvidia-smi")
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def summary(self) -> dict[str, Any]:
        """Of the samples: SM clock, power and temperature, and the share of samples with each reason to throttle."""
        return summarize(self._lines)

    def _watch(self) -> None:
        assert self.gpu is not None, "start() watches a GPU"
        reasons = list(_REASONS_FIELDS)
        while reasons:
            line = _ask(self.gpu, (*_FIELDS, reasons[0]))
            if line is None:
                del reasons[0]
                continue
            self._lines.append(line)
            if self._stopped.wait(_SECONDS):
                return


def _ask(gpu: str, fields: Sequence[str]) -> str | None:
    """One line of nvidia-smi, or None where it is missing or does not know a field."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def summarize(lines: Iterable[str]) -> dict[str, Any]:
    """`Monitor.summary` of lines `clock, power, temperature, power limit, reasons`; what is no number is left out."""
    samples = []
    for line in lines:
        fields = [field.strip() for field in line.split(",")]
        try:
            samples.append((*(float(field) for field in fields[:4]), int(fields[4], 16)))
        except (ValueError, IndexError):
            continue
    if not samples:
        return {}
    clock, power, temperature, limit, reasons = zip(*samples, strict=True)
    return {
        "samples": len(samples),
        "sm_clock_mhz": {"mean": round(statistics.mean(clock)), "min": round(min(clock)), "max": round(max(clock))},
        "power_w": {"mean": round(statistics.mean(power)), "max": round(max(power)), "limit": round(max(limit))},
        "temperature_c": {"max": round(max(temperature))},
        "throttling": {
            name: round(sum(bool(r & bit) for r in reasons) / len(samples), 3)
            for bit, name in _REASONS.items()
            if any(r & bit for r in reasons)
        },
    }
