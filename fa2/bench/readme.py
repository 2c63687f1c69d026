"""`python -m fa2.bench.readme` writes the tables of fa2/README.md from the records in `results/`; `--check` compares.

A table stands between `<!-- table: name -->` and `<!-- end -->`; each name is a function here that makes its text from
a record. A table whose record is not there yet says which command makes it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fa2.bench.llama import ATTENTIONS

README = Path(__file__).resolve().parents[1] / "README.md"
RESULTS = Path(__file__).resolve().parent / "results"
_TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Record = dict[str, Any]


def _machine(record: Record) -> str:
    m = record["machine"]
    words = [m["device"], f"torch {m['torch']}"]
    words += [f"driver {m['driver']}"] if "driver" in m else []
    words += [f"commit {m['commit']}"] if m.get("commit") else []
    return ", ".join([*words, m["date"]])


def _pair(row: Record, part: str, ours: str, peer: str) -> str:
    """`396 (1.12)`: our TFLOP/s and their ratio to the peer's."""
    mine, theirs = row[part].get(ours), row[part].get(peer)
    return f"{mine['tflops']:.0f} ({mine['tflops'] / theirs['tflops']:.2f})" if mine and theirs else "–"


def _rate(row: Record, part: str, peer: str) -> str:
    instead = f"{part}_autograd" if part == "backward" else part
    reading = row[part].get(peer) or row.get(instead, {}).get(peer)
    return f"{reading['tflops']:.0f}" if reading else "–"


def _rates(row: Record, names: Iterable[str]) -> list[str]:
    return [f"{_rate(row, 'forward', p)}/{_rate(row, 'backward', p)}" for p in names]


def _measured(rows: Sequence[Record], names: dict[str, str]) -> dict[str, str]:
    """Of the peers, those that the record has: key -> title."""
    return {peer: title for peer, title in names.items() if any(peer in row["forward"] for row in rows)}


def _header(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]


def _mean(record: Record, ours: str, key: str, parts: Sequence[str]) -> str:
    means = record["geometric_means"].get(key)
    if not means:
        return ""
    text = ", ".join(
        f"{part} {means[part]['mean']:.2f} (least {means[part]['least']:.2f})" for part in parts if part in means
    )
    return f" {ours} over {key.split('/')[1]}, geometric means: {text}."


def _sm80(row: Record) -> str:
    """The name under which the record has the sm80 kernels: they are fa2's own where there are no newer ones."""
    return "fa2_sm80" if "fa2_sm80" in row["forward"] else "fa2"


def sweep_table(record: Record) -> str:
    """The paper's sweep."""
    ceiling = statistics.mean(record["matmul_tflops"])
    rows = [row for row in record["rows"] if row["suite"] == "paper"]
    peers = _measured(rows, {"sdpa_flash": "SDPA flash", "sdpa_cudnn": "SDPA cuDNN", "eager": "eager"})
    newest = ("fa2 forward (over SDPA cuDNN)", "backward", "both, % of the matmul")
    sm80 = ("sm80 kernels, forward (over SDPA flash)", "backward")
    lines = _header("headdim, mask", "seqlen", *newest, *sm80, *peers.values())
    for row in sorted(rows, key=lambda r: (r["headdim"], r["causal"], r["seqlen"])):
        cells = [
            f"{row['headdim']} {'causal' if row['causal'] else 'full'}",
            str(row["seqlen"]),
            *(_pair(row, part, "fa2", "sdpa_cudnn") for part in ("forward", "backward")),
            "/".join(f"{row[part]['fa2']['tflops'] / ceiling:.0%}" for part in ("forward", "backward")),
            *(_pair(row, part, _sm80(row), "sdpa_flash") for part in ("forward", "backward")),
            *_rates(row, peers),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]["forward"]["fa2"]
    spread = max(r["spread"] for row in rows for part in ("forward", "backward") for r in row[part].values())
    key = "paper/sdpa_flash" + ("/fa2_sm80" if _sm80(rows[0]) == "fa2_sm80" else "")
    lines += [
        "",
        f"TFLOP/s, 16k tokens, hidden 2048, bf16, medians of {first['n']} runs in rounds with the peers; the rounds' "
        f"own medians differ by at most {spread:.0%}."
        f"{_mean(record, 'fa2', 'paper/sdpa_cudnn', ['forward', 'backward'])}"
        f"{_mean(record, 'sm80 kernels', key, ['forward', 'backward'])} Sequences of 1k to 16k count. Matmul 8192³, "
        f"sustained: {ceiling:.0f}. {_machine(record)}.",
        "",
        f"![the sweep](bench/results/{Path(_BENCH[0]).with_name('bench.png')})",
    ]
    return "\n".join(lines)


def packed_table(record: Record) -> str:
    """Packed documents and grouped queries."""
    rows = [row for row in record["rows"] if row["suite"] == "packed"]
    peers = _measured(rows, {"varlen_attn": "varlen_attn", "flex": "FlexAttention"})
    ours = ("fa2 forward (over varlen_attn)", "backward", "sm80 kernels, forward", "backward")
    lines = _header("documents", *ours, *peers.values())
    for row in rows:
        cells = [
            row["case"],
            *(_pair(row, part, "fa2", "varlen_attn") for part in ("forward", "backward")),
            *(_pair(row, part, _sm80(row), "varlen_attn") for part in ("forward", "backward")),
            *_rates(row, peers),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    key = "packed/varlen_attn" + ("/fa2_sm80" if rows and _sm80(rows[0]) == "fa2_sm80" else "")
    lines += [
        "",
        "TFLOP/s over the true lengths, causal, 16 heads of 128, 32k tokens."
        f"{_mean(record, 'fa2', 'packed/varlen_attn', ['forward', 'backward'])}"
        f"{_mean(record, 'sm80 kernels', key, ['forward', 'backward'])}",
    ]
    grouped = [row for row in record["rows"] if row["suite"] == "gqa"]
    if grouped:
        text = "; ".join(
            f"{row['seqlen']}: {_pair(row, 'forward', 'fa2', 'sdpa_cudnn')} and "
            f"{_pair(row, 'backward', 'fa2', 'sdpa_cudnn')}, "
            f"{_pair(row, 'forward', _sm80(row), 'sdpa_flash')} and {_pair(row, 'backward', _sm80(row), 'sdpa_flash')}"
            for row in grouped
        )
        lines += [
            "",
            "64 query heads over 8 kv heads of 128, causal: fa2's forward and backward over SDPA cuDNN, the sm80 "
            f"kernels' over SDPA flash: {text}.",
        ]
    return "\n".join(lines)


def deterministic_table(record: Record) -> str:
    """What a fixed order of dq costs."""
    lines = ["| headdim | mask | backward, over the time without |", "| --- | --- | --- |"]
    lines += [
        f"| {r['headdim']} | {r['mask']} {r['seqlen']} | {r['cost']:.2f} |" for r in record.get("deterministic", [])
    ]
    return "\n".join(lines)


def host_table(record: Record) -> str:
    """The host's time for one call, beside SDPA's."""
    host = record.get("host_us")
    if not host:
        return "The record has no `--host-overhead`."
    lines = _header("host, µs a call", "fa2", "SDPA flash", "fa2 / SDPA flash")
    for call, peer in (("function", "SDPA flash"), ("function and backward", "SDPA flash and backward")):
        lines.append(f"| {call} | {host[call]:.0f} | {host[peer]:.0f} | {host[call] / host[peer]:.2f} |")
    lines += [
        "",
        f"fa2's operators without autograd: forward {host['operator forward']:.0f} µs, backward "
        f"{host['operator backward']:.0f} µs. {_machine(record)}.",
    ]
    return "\n".join(lines)


def _kernel(name: str) -> str:
    """A kernel's name without its template and call arguments."""
    return re.sub(r"^void |[<(].*", "", name)


def llama_table(record: Record) -> str:
    """A Hugging Face Llama's training step."""
    lines = _header("step", "attention", "ms", "tokens/s", "fa2's speed over it", "peak memory, GB", "first loss")
    ran: dict[str, str] = {}
    spread = 0.0
    measured = {
        part: found for part, found in record["parts"].items() if all("speed_over" in r for r in found.values())
    }
    for part, found in measured.items():
        for name, r in found.items():
            over = found["fa2"]["speed_over"].get(name)
            cells = [f"{r['ms']:.1f}", f"{r['tokens_per_s']:.0f}", f"{over:.3f}" if over else "–"]
            cells += [f"{r['peak_gb']:.1f}", f"{r['loss']:.4f}"]
            lines.append(f"| {' | '.join((part, ATTENTIONS[name].title, *cells))} |")
            ran[f"{name}, {part}"] = ", ".join(dict.fromkeys(f"`{_kernel(kernel)}`" for kernel in r["kernels"]))
            spread = max(spread, r["spread"])
    model, asked = record["model"], record["options"]
    text = (
        f"Llama, {model['parameters'] / 1e9:.2f}B parameters: {model['num_hidden_layers']} layers, hidden "
        f"{model['hidden_size']}, {model['num_attention_heads']} query heads over {model['num_key_value_heads']} kv "
        f"heads of {model['head_dim']}, vocabulary {model['vocab_size']}, tied. bf16 parameters, fused AdamW; forward, "
        f"loss, backward and optimizer; {asked['batch']} x {asked['seqlen']} tokens"
    )
    if "packed" in record["parts"]:
        text += f", packed: the same number in one row of {len(record['documents'])} documents"
    if "compiled" in record["parts"]:
        text += "; compiled: `torch.compile` of each layer"
    readings = [r for found in measured.values() for r in found.values()]
    differ = max((r["gradients_differ"] for r in readings), default=0.0)
    n = max((r["n"] for r in readings), default=0)
    lines += [
        "",
        f"{text}. Medians of {n} steps in {asked['rounds']} rounds with the peers; the rounds' own medians differ by "
        f"at most {spread:.1%}. Gradients of the projections at the first step differ from sdpa's by at most "
        f"{differ:.1%}. {_machine(record)}, transformers {record['machine']['transformers']}.",
    ]
    for line in record["left_out"]:
        lines += ["", f"Left out: {line}."]
    if record["error"]:
        lines += ["", f"The run stopped: {record['error']}."]
    if any(ran.values()):
        lines += ["", "Attention kernels that ran: " + "; ".join(f"{name}: {text}" for name, text in ran.items()) + "."]
    return "\n".join(lines)


def correctness_table(record: Record) -> str:
    """The random differential test."""
    lines = ["| result | worst error over its bound |", "| --- | --- |"]
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in record["worst_over_bound"].items()]
    kernels = f", kernels in turn: {', '.join(record['kernels'])}" if "kernels" in record else ""
    lines += [
        "",
        f"{record['draws']} random problems against float64{kernels}; {len(record['failures'])} failures. "
        f"{_machine(record)}.",
    ]
    return "\n".join(lines)


# Name -> its record in results/, what makes the text, the command that makes the record.
_BENCH = ("bench_h200/bench.json", "python -m fa2.bench --host-overhead --out fa2/bench/results/bench_h200")
_RANDOM = (
    "correctness_h200.json",
    "python -m fa2.bench.correctness --draws 4000 --kernels newest,large,newest,middle,newest,small "
    "--out fa2/bench/results/correctness_h200.json",
)
_LLAMA = (
    "llama_h200.json",
    "python -m fa2.bench.llama --packed --compile --out fa2/bench/results/llama_h200.json",
)
TABLES: dict[str, tuple[str, str, Callable[[Record], str]]] = {
    "sweep": (*_BENCH, sweep_table),
    "packed": (*_BENCH, packed_table),
    "deterministic": (*_BENCH, deterministic_table),
    "host": (*_BENCH, host_table),
    "llama": (*_LLAMA, llama_table),
    "correctness": (*_RANDOM, correctness_table),
}


def readme_tables(text: str, results: Path = RESULTS) -> str:
    """`text` with each table between its markers made anew.

    Raises:
        KeyError: a marker names a table that does not exist.
    """

    def made(match: re.Match[str]) -> str:
        path, command, make = TABLES[match["name"]]
        if not (results / path).is_file():
            body = f"No record yet: `{command}`."
        else:
            body = make(json.loads((results / path).read_text(encoding="utf-8")))
        return f"{match[1]}{body}\n{match[3]}"

    return _TABLE.sub(made, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa2.bench.readme", description="Tables of fa2/README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where README and records differ")
    check = parser.parse_args(argv).check
    old = README.read_text(encoding="utf-8")
    new = readme_tables(old)
    if check:
        if old != new:
            print("fa2/README.md differs from the records: run python -m fa2.bench.readme", file=sys.stderr)
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
