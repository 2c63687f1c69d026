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


def losses_table(path: str, command: str) -> str:
    """Of a record of train.compare_attention; what makes it, where there is none."""
    if not (ROOT / path).is_file():
        return f"No record yet: `{command} --output {path}` makes it."
    from train.compare_attention import NOISE, families

    record = _record(path)
    machine = record["machine"]
    first, *others = record["losses"]
    end = f"over the last {record['last_steps']} steps"
    lines = [
        f"| losses of | mean distance from `{first}`, nats | {end} | mean difference | {end} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in others:
        row = record["distance_from_first"][name]
        label = "the same backend, initial weights larger by one bf16 epsilon" if name == NOISE else f"`{name}`"
        if served := families(record["kernels"].get(name, [])):
            label += f" ({', '.join(f'{part} {family}' for part, family in sorted(served.items(), reverse=True))})"
        lines.append(
            f"| {label} | {row['mean']:.4f} | {row['end']:.4f} | {row['drift']:+.4f} | {row['drift_end']:+.4f} |"
        )
    limits = record["limits"]
    lines.append(
        f"| a drift: {limits['factor']:g} times the last row's distance, or more | | "
        f"| ±{limits['drift']:.4f} | ±{limits['drift_end']:.4f} |"
    )
    steps = len(record["losses"][first])
    drifting = ", ".join(f"`{name}`" for name in record["drifting"]) or "none"
    lines += [
        "",
        f"Drifting: {drifting}. {record['n_params'] / 1e6:.0f} million parameters, {steps} steps of "
        f"{record['tokens_per_step']:,} tokens, bf16, {machine['gpu']}, torch {machine['torch']}: "
        f"`{record['command']}`; [the curves]({path.replace('.json', '.png')}).",
    ]
    return "\n".join(lines)


def attention_table() -> str:
    return losses_table(*ATTENTION)


def attention_125m_table() -> str:
    return losses_table(*ATTENTION_125M)


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


def reproduce_further() -> str:
    """The rows of further records, each behind the command that made it."""
    from train.reproduce import tables

    parts = []
    for path, title in FURTHER.items():
        record = _record(path)
        commands = ", ".join(f"`{invocation['command']}`" for invocation in record["invocations"])
        parts += [f"{title}: {commands}", tables.details(record), tables.notes(record)]
    return "\n\n".join(parts)


def a100_table() -> str:
    from train.reproduce import tables

    return tables.a100_expectation()


# A record of train.compare_attention, and the command that makes it.
ATTENTION = (
    "train/results/attention_h200.json",
    "python -m train.compare_attention --backends reference,fa2,torch model.n_layer=4 model.d_model=512 "
    "model.nheads_q=4 model.max_positions=2048 batch.context=2048 batch.micro_batch_tokens=8192 "
    "batch.global_batch_tokens=8192 optim.lr=6e-4 optim.warmup_steps=100 trainer.max_steps=200 trainer.compile=false",
)
ATTENTION_125M = (
    "train/results/attention_125m_h200.json",
    "python -m train.compare_attention --backends torch,fa2,fa2:sm80 experiment=gpt3_125m data=stdlib tokenizer=train "
    "tokenizer.vocab_size=50257 batch.micro_batch_tokens=8192 batch.global_batch_tokens=8192 optim.warmup_steps=100 "
    "trainer.max_steps=500",
)
REPRODUCED = "train/results/reproduce_h200/reproduce.json"
FURTHER = {
    "train/results/reproduce_1.3b_h200/reproduce.json": "The 1.3B rows at a later commit, three backends in one run",
    "train/results/reproduce_2.7b_32k_h200/reproduce.json": "2.7B with twice the recipe's micro-batch, all activations "
    "kept",
}
TABLES: dict[str, Callable[[], str]] = {
    "packing": packing_table,
    "reproduce": reproduce_table,
    "reproduce_further": reproduce_further,
    "a100": a100_table,
    "attention": attention_table,
    "attention_125m": attention_125m_table,
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
