"""The README says what is true: its tables agree with the records, its commands compose, its links and paths exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from train import cli, readme
from train.__main__ import COMMAND

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
TRAIN_COMMANDS = [
    line for block in CODE for line in block.splitlines() if re.match(r"python -m train(\.prepare)? ", line)
]


def test_tables_agree_with_the_records() -> None:
    assert len(re.findall(r"<!-- table: ", README)) == len(readme.TABLES)
    assert readme.render(README) == README, "run python -m train.readme"


def test_a_table_that_differs_is_noticed() -> None:
    name = next(iter(readme.TABLES))
    assert readme.render(f"<!-- table: {name} -->\nold\n<!-- end -->") != f"<!-- table: {name} -->\nold\n<!-- end -->"


@pytest.mark.parametrize("command", TRAIN_COMMANDS)
def test_training_commands_compose(command: str) -> None:
    words = [word for word in shlex.split(command, comments=True)[3:] if word != "-m" and "${" not in word]
    cli.build(COMMAND, [word for word in words if "," not in word or word.startswith("data.paths")])


def test_there_are_training_commands() -> None:
    assert len(TRAIN_COMMANDS) >= 5


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_to_files(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:fa2|model|data|train|conf|tests)/[\w./]*)`", README))))
def test_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()
