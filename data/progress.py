"""A progress bar of one line on stderr; silent where stderr is no terminal."""

from __future__ import annotations

import sys
import time


class ProgressBar:
    """Shows bytes done of a total (0: unknown) with rate and remaining time, at most ten times a second."""

    def __init__(self, label: str, total_bytes: int, enabled: bool = True):
        self.label, self.total = label, total_bytes
        self.enabled = enabled and sys.stderr.isatty()
        self.done = 0
        self._start = time.monotonic()
        self._shown = 0.0

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes
        now = time.monotonic()
        if not self.enabled or now - self._shown < 0.1:
            return
        self._shown = now
        rate = self.done / max(now - self._start, 1e-6)
        line = f"{self.label} {self.done / 1e6:,.1f} MB"
        if self.total:
            share = min(self.done / self.total, 1.0)
            remaining = max(self.total - self.done, 0) / max(rate, 1.0)
            line = f"{self.label} [{'#' * int(24 * share):24}] {share:4.0%} of {self.total / 1e6:,.1f} MB"
            line += f", {remaining:,.0f} s left"
        print(f"\r\033[K{line}, {rate / 1e6:.1f} MB/s", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.enabled and self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
