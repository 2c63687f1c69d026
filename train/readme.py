"""`python -m train.readme` writes the README's tables from the JSON records in the repository; `--check` only compares.

A table stands between `<!-- table: name -->` and `<!-- end -->`; each name is a function here that makes its text.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _record(path: str) -> dict[str, Any]:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def packing_table() -> str:
    record = _record("train/results/packing.json")
    machine, text = record["machine"], record["stdlib"]
    rows = {(row["packing"], row["context"]): row for row in record["packing"]}
    lines = [
        "| packing | batches built, million tokens/s on one core | fill at 2k, at 8k | pieces that begin inside their "
        "document, at 2k, at 8k |",
        "| --- | --- | --- | --- |",
    ]
    for speed in record["speed"]:
        short, long = (rows[speed["packing"], context] for context in (2048, 8192))
        lines.append(
            f"| `{speed['packing']}` | {speed['median_million_tokens_per_s']:.0f} "
            f"| {short['fill']:.2%}, {long['fill']:.2%} "
            f"| {short['continued_pieces']:.1%}, {long['continued_pieces']:.1%} |"
        )
    lines += [
        "",
        f"Speed: documents of 32 to 252 tokens, median of {record['speed'][0]['n']}, tensors included, "
        f"{machine['cpu']}, Python {machine['python']}. Fill: the standard library, {text['documents']:,} documents, "
        f"{text['tokens'] / 1e6:.1f} million tokens.",
    ]
    return "\n".join(lines)


def attention_table() -> str:
    record = _record("train/results/attention_h200.json")
    machine = record["machine"]
    first, *others = record["losses"]
    lines = [f"| losses of | mean distance from `{first}`, nats | over the last tenth |", "| --- | --- | --- |"]
    for name in others:
        row = record["distance_from_first"][name]
        label = "the same backend, initial weights larger by one bf16 epsilon" if name == "noise" else f"`{name}`"
        lines.append(f"| {label} | {row['mean']:.3f} | {row['end']:.3f} |")
    steps = len(record["losses"][first])
    lines += ["", f"{steps} steps, bf16, {machine['gpu']}, torch {machine['torch']}: `{record['command']}`."]
    return "\n".join(lines)


def reproduce_table() -> str:
    if not (ROOT / REPRODUCED).is_file():
        return "No record yet: `python -m train.reproduce output=train/results/reproduce_h200` makes it."
    from train.reproduce import tables

    record = _record(REPRODUCED)
    picture = f"![mfu beside the paper's]({REPRODUCED.replace('.json', '.png')})"
    parts = [tables.summary(record), tables.details(record), tables.notes(record), picture]
    if budgets := [cell for cell in record["cells"] if "budget" in cell]:
        cell = budgets[0]
        name = tables.budget_name(cell)
        parts += [
            f"Where one step of {tables.TITLES[cell['row']]} {cell['data']} with "
            f"{tables.BACKENDS[cell['attention']]} goes:",
            tables.budget_table(cell),
            f"![a step's time, and the roofline]({Path(REPRODUCED).parent.as_posix()}/{name}.png)",
        ]
    return "\n\n".join(parts)


def a100_table() -> str:
    from train.reproduce import tables

    return tables.a100_expectation()


REPRODUCED = "train/results/reproduce_h200/reproduce.json"
TABLES: dict[str, Callable[[], str]] = {
    "packing": packing_table,
    "reproduce": reproduce_table,
    "a100": a100_table,
    "attention": attention_table,
}


def render(text: str) -> str:
    """`text` with each table between its markers made anew.

    Raises:
        KeyError: a marker names a table that does not exist.
    """
    return _TABLE.sub(lambda m: f"{m[1]}{TABLES[m['name']]()}\n{m[3]}", text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where README and records differ")
    check = parser.parse_args(arguments).check
    old = README.read_text(encoding="utf-8")
    new = render(old)
    if check:
        if old != new:
            print("README.md differs from the records: run python -m train.readme", file=sys.stderr)
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
