"""`python -m train.reproduce`: run the cells, write each into the record as it ends, print the tables, draw the plots.

Read next: `rows.py`, `cell.py`, `record.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train import cli
from train.schema import ReproduceConfig

Record = dict[str, Any]


def run(config: ReproduceConfig) -> None:
    # torch takes seconds to import: mistakes and help come before it
    from train.reproduce import record
    from train.reproduce.rows import cells
    from train.run_dir import locked

    chosen = cells(config)
    folder = record.open_folder(config.output)
    with locked(folder, record.IN_USE):
        _run(config, chosen, folder)


def _run(config: ReproduceConfig, chosen: Sequence[Any], folder: Path) -> None:
    from train.reproduce import plot, record, tables

    path = folder / "reproduce.json"
    if chosen and config.budget and record.device().type != "cuda":
        raise ValueError("budget must be empty on a machine without a CUDA GPU, whose kernels it looks at")
    machine = record.describe_machine(record.device()) if chosen else None
    book = record.open_record(path, machine, config.merge)
    try:
        errors = measure_all(config, chosen, book, path) if chosen else []
    except KeyboardInterrupt:
        print(
            f"interrupted: what had finished is in {path}; rows=[] with this output makes its tables", file=sys.stderr
        )
        raise
    record.write(book, path)
    said = "\n\n".join(part for part in (tables.summary(book), tables.details(book), tables.notes(book)) if part)
    for cell in book["cells"]:
        if "budget" in cell:
            said += f"\n\n{tables.budget_name(cell)}\n\n{tables.budget_table(cell)}"
            plot.plot_budget(cell, folder / f"{tables.budget_name(cell)}.png")
    (folder / "tables.md").write_text(said + "\n", encoding="utf-8")
    plotted = plot.plot_table(book, folder / "reproduce.png")
    print(f"\n{said}\n\nwritten to {path}, tables.md{' and reproduce.png' if plotted else ''}", flush=True)
    if errors:
        raise ValueError("; ".join(errors))


def measure_all(config: ReproduceConfig, chosen: Sequence[Any], book: Record, path: Path) -> list[str]:
    """Measures the cells one after the other into `book`; returns what was wrong with some, in words."""
    from train.reproduce import record
    from train.reproduce.cell import outcome

    began = time.monotonic()
    invocation = record.begin_invocation(book)
    errors = []
    for i, cell in enumerate(chosen):
        elapsed = time.monotonic() - began
        print(f"\n[{i + 1}/{len(chosen)}] {cell.name}, after {elapsed:.0f} s", flush=True)
        if config.seconds is not None and elapsed > config.seconds:
            print(f"not begun: seconds={config.seconds:g} are over", flush=True)
            continue
        result = outcome(cell) | {"invocation": invocation}
        record.put(book, result)
        record.write(book, path)
        print(_said(cell, result), flush=True)
        if result["status"] in ("refused", "crashed"):
            errors.append(f"{cell.name}: {result['reason']}")
    return errors


def _said(cell: Any, result: Record) -> str:
    """One line about a finished cell."""
    if result["status"] != "ok":
        return f"{cell.name}: {result['status'].replace('_', ' ')}: {result['reason']}"
    keys = [key for key in ("mfu", "mfu_exact", "gemm_util") if result[key] is not None]
    shares = ", ".join(f"{key} {result[key]:.1%}" for key in keys)
    steps = ", ".join(f"{seconds:.2f}" for seconds in result["step_seconds"])
    return (
        f"{cell.name}: {result['tokens_per_s']:,.0f} tokens/s, {shares}; steps of {steps} s; "
        f"first step begun {result['seconds_to_first_step']:.0f} s after the command and done after "
        f"{result['seconds_to_first_step_done']:.0f} s; kernels {json.dumps(result['kernels'][:2])}"
    )


COMMAND = cli.Command("train.reproduce", "reproduce", ReproduceConfig, run, literal=("output",))


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
