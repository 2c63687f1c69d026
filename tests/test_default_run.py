"""The default run as a user starts it: it learns, and leaves what the README promises."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROMISED = ("report.html", "curves.png", "metrics.csv", "samples.txt", "config.yaml", "tokenizer.json", "checkpoints")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_default_run_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "train", f"run_root={tmp_path}/runs", f"data.cache_dir={tmp_path}/cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)

    last = re.findall(r"([\d.]+) bits per byte \(unigram ([\d.]+), gzip -9 ([\d.]+)\)", done.stdout)[-1]
    reached, unigram, gzip = map(float, last)
    assert reached <= 2.1
    assert reached < unigram
    assert 1.0 < gzip < unigram
    run = tmp_path / "runs" / "default"
    assert str(run / "report.html") in done.stdout
    assert [name for name in PROMISED if not (run / name).exists()] == []
    assert (run / "samples.txt").read_text().strip()
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
