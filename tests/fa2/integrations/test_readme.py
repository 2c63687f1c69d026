"""The examples of fa2's README run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "fa2" / "README.md").read_text(encoding="utf-8").split("## In other people's models\n")[1]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", SECTION.split("\n## ")[0], re.DOTALL | re.MULTILINE)


def test_there_are_three() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int) -> None:
    example = EXAMPLES[number]
    if "transformers" in example:
        pytest.importorskip("transformers")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "torch's own flash attention runs" not in run.stderr
