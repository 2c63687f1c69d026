from __future__ import annotations

import io
import sys

import pytest

from data.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO(), True), (Terminal(), False)])
def test_silent_without_a_terminal_or_when_switched_off(monkeypatch, stream, enabled: bool):
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar("tokenizing", 100, enabled)
    bar.advance(50)
    bar.close()
    assert stream.getvalue() == ""


def test_shows_share_and_amount(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    ProgressBar("tokenizing", 4_000_000).advance(1_000_000)
    assert "25% of 4.0 MB" in terminal.getvalue()
    ProgressBar("reading", 0).advance(2_000_000)
    assert "reading 2.0 MB" in terminal.getvalue()
