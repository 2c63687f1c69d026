"""The tables that are printed and that the README holds, in Markdown, made from a record alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from model.config import GPTConfig, Position
from model.flops import paper_flops
from model.memory import count_params

Record = dict[str, Any]

A100_PEAK_TFLOPS = 312.0
TRAINING_TOKENS = 300e9  # of a GPT-3, for "days"
# TFLOP/s of each A100: without flash, FlashAttention 1, FlashAttention-2.
# Source: FlashAttention-2 (arXiv 2307.08691), table 1: 8 A100 80GB SXM.
PAPER: dict[str, tuple[float, float, float]] = {
    "1.3b_2k": (142, 189, 196),
    "1.3b_8k": (72, 170, 220),
    "2.7b_2k": (149, 189, 205),
    "2.7b_8k": (80, 175, 225),
}
TITLES = {"1.3b_2k": "1.3B, 2k", "1.3b_8k": "1.3B, 8k", "2.7b_2k": "2.7B, 2k", "2.7b_8k": "2.7B, 8k", "debug": "debug"}
BACKENDS = {
    "eager": "eager",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "torch": "torch varlen",
    "fa2": "fa2",
    "reference": "reference",
}
# Whose speed fa2's is divided by, the first that the same invocation measured.
_PEERS = ("sdpa_cudnn", "sdpa_flash", "torch")
_STATUS = {"out_of_memory": "out of memory", "refused": "refused", "crashed": "crashed"}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(*titles: str) -> list[str]:
    return [_line(titles), "|" + " --- |" * len(titles)]


def _all(record: Record, row: str, data: str, attention: str) -> list[Record]:
    """The cells of one place in the table: what was measured first, the recipe before its variants."""
    found = [c for c in record["cells"] if (c["row"], c["data"], c["attention"]) == (row, data, attention)]
    return sorted(found, key=lambda c: (c["status"] != "ok", not c["recipe"], -c["micro_batch_tokens"]))


def _find(record: Record, row: str, data: str, attention: str) -> Record | None:
    """The cell, at the recipe's micro-batch where it was measured there, otherwise at the largest that was."""
    return next(iter(_all(record, row, data, attention)), None)


def _rows(record: Record) -> list[tuple[str, str]]:
    """(row, data) in the order of the paper's table, dense first."""
    there = {(cell["row"], cell["data"]) for cell in record["cells"]}
    return [(row, data) for data in ("dense", "packed") for row in TITLES if (row, data) in there]


def _backends(record: Record, data: str) -> list[str]:
    """Those that were asked for on this kind of data."""
    used = {cell["attention"] for cell in record["cells"] if cell["data"] == data}
    return [name for name in BACKENDS if name in used]


def tflops(cell: Record) -> float:
    """TFLOP/s by the paper's formula."""
    seconds = cell["tokens"] / cell["tokens_per_s"]
    shape = cell["model"]
    flops = paper_flops(cell["n_params"], shape["n_layer"], shape["d_model"], cell["tokens"], cell["sum_len_sq"])
    return flops / seconds / 1e12


def days(cell: Record) -> float:
    """Of a training over 300 billion tokens on this one GPU."""
    return TRAINING_TOKENS / cell["tokens_per_s"] / 86_400


def _short(cell: Record | None) -> str:
    if cell is None:
        return "–"
    if cell["status"] == "not_applicable":
        return "n/a"
    if cell["status"] == "does_not_fit":
        return "does not fit"
    if cell["status"] != "ok":
        return _STATUS[cell["status"]]
    share = "" if cell["mfu"] is None else f" ({cell['mfu']:.1%})"
    return f"{tflops(cell):#.3g}".rstrip(".") + share + ("" if cell["recipe"] else "*")


def summary(record: Record) -> str:
    """Ours beside the paper's, TFLOP/s and mfu: one line for each row and kind of data."""
    lines: list[str] = []
    for data in ("dense", "packed"):
        rows = [row for row, kind in _rows(record) if kind == data]
        backends = _backends(record, data)
        if not rows or not backends:
            continue
        paper = ("A100: no flash", "FlashAttention 1", "FlashAttention-2") if data == "dense" else ()
        lines += ["", *_header(f"{data}: model, context", *(BACKENDS[name] for name in backends), *paper)]
        for row in rows:
            ours = [_short(_find(record, row, data, name)) for name in backends]
            theirs = [f"{t:.0f} ({t / A100_PEAK_TFLOPS:.1%})" for t in PAPER.get(row, ())] or ["–"] * 3
            lines.append(_line([TITLES[row], *ours, *(theirs if data == "dense" else ())]))
    return "\n".join(lines[1:])


def details(record: Record) -> str:
    """Every measured cell with all its figures, and below them why the others have none."""
    lines = _header(
        "model, context, data",
        "attention",
        "`mfu`",
        "`mfu_exact`",
        "`gemm_util`",
        "tokens/s",
        "fa2 over its fastest peer",
        "peak GiB",
        "days for 300B tokens",
    )
    without = []
    for row, data in _rows(record):
        for cell in (cell for name in BACKENDS for cell in _all(record, row, data, name)):
            name = cell["attention"]
            if cell["status"] == "not_applicable":
                continue
            if cell["status"] != "ok":
                without.append(f"- {TITLES[row]} {data}, {BACKENDS[name]}{_variant(cell)}: {_reason(cell)}.")
                continue
            peak = cell.get("peak_memory_bytes")
            lines.append(
                _line(
                    [
                        f"{TITLES[row]} {data}",
                        BACKENDS[name] + _variant(cell),
                        *("n/a" if cell[key] is None else f"{cell[key]:.1%}" for key in ("mfu", "mfu_exact")),
                        f"{cell['gemm_util']:.1%}",
                        f"{cell['tokens_per_s']:,.0f}",
                        _over(record, cell),
                        "–" if peak is None else f"{peak / (1 << 30):.0f}",
                        f"{days(cell):,.0f}",
                    ]
                )
            )
    return "\n".join([*lines, *(["", *without] if without else [])])


def _variant(cell: Record) -> str:
    """What differs from the recipe, to stand behind the backend's name."""
    if cell["recipe"]:
        return ""
    return ", " + " ".join([*cell["overrides"], f"micro-batch {cell['micro_batch_tokens']:,}"])


def _reason(cell: Record) -> str:
    """Why a cell has no figures."""
    if cell["status"] == "out_of_memory":
        return f"out of memory; {cell['needs']}"
    return cell["reason"].rstrip(".")


def _over(record: Record, cell: Record) -> str:
    """fa2's speed over the fastest peer's of the same invocation and the same conditions: others make no ratio."""
    if cell["attention"] != "fa2":
        return "–"
    same = ("row", "data", "invocation", "micro_batch_tokens", "overrides")
    peers = [
        other
        for other in record["cells"]
        if other["attention"] in _PEERS and other["status"] == "ok" and all(other[key] == cell[key] for key in same)
    ]
    if not peers:
        return "–"
    best = max(peers, key=lambda other: other["tokens_per_s"])
    return f"{cell['tokens_per_s'] / best['tokens_per_s']:.2f} of {BACKENDS[best['attention']]}'s"


def notes(record: Record) -> str:
    """What stands below the tables: machine, method, clocks, data."""
    machine = record["machine"]
    ok = [cell for cell in record["cells"] if cell["status"] == "ok"]
    words = [machine["gpu"] or machine["cpu"], f"torch {machine['torch']}"]
    words += [f"driver {machine['driver']}"] if machine["driver"] else []
    words += [f"commit {machine['commit'][:12]}"] if machine["commit"] else []
    text = [", ".join(words) + "."]
    if ok:
        first = ok[0]
        text.append(f"{first['precision']}, {first['global_batch_tokens']:,} tokens a step by accumulation.")
        rates = [rate for cell in ok for rate in cell["matmul_tflops"]]
        slowest, fastest = (f"{rate:#.3g}".rstrip(".") for rate in (min(rates), max(rates)))
        text.append(f"Sustained matrix products beside the steps: {slowest} to {fastest} TFLOP/s.")
        text += _of_gpu(ok)
    if packed := [cell for cell in ok if cell["data"] == "packed"]:
        text += _of_packed(packed)
    if ok:
        begun = [cell["seconds_to_first_step"] for cell in ok]
        done = [cell["seconds_to_first_step_done"] for cell in ok]
        text.append(
            f"From a run's command to its first step {min(begun):.0f} to {max(begun):.0f} s, to that step's end "
            f"{min(done):.0f} to {max(done):.0f} s."
        )
    if (count := len({cell["invocation"] for cell in ok})) > 1:
        text.append(f"Cells of {count} invocations; ratios are of cells of the same one.")
    if any(not cell["recipe"] for cell in ok):
        text.append("*: another micro-batch or other overrides than the recipe's.")
    return " ".join(text)


def _of_gpu(cells: Sequence[Record]) -> list[str]:
    watched = [cell["gpu"] for cell in cells if cell["gpu"]]
    if not watched:
        return []
    clocks = [w["sm_clock_mhz"]["mean"] for w in watched]
    power = [w["power_w"]["mean"] for w in watched]
    reasons = sorted({reason for w in watched for reason in w["throttling"]})
    throttled = f"throttled by {' and '.join(reasons)}" if reasons else "not throttled"
    return [f"SM clock {min(clocks)} to {max(clocks)} MHz, {min(power)} to {max(power)} W, {throttled}."]


def _of_packed(cells: Sequence[Record]) -> list[str]:
    cell = max(cells, key=lambda c: c["context"])
    pieces = cell["packing"]["pieces_per_micro_batch"]
    mean = cell["packing"]["fill"] * cell["micro_batch_tokens"] / pieces
    share = cell["sum_len_sq"] / cell["tokens"] / cell["context"]
    return [
        f"Packed: {cell['documents']}, at a context of {cell['context']:,} pieces of {mean:,.0f} tokens on average, "
        f"Σ len² {share:.0%} of full documents'. SDPA takes no document lengths: torch's varlen_attn stands in for it."
    ]


_IN_WORDS = {
    "loss, the rest": "the loss beside its GEMM",
    "clipping": "the gradients' norm",
    "optimiser": "the optimiser",
    "elementwise": "elementwise kernels",
    "data and its copy": "waiting for data and copying it",
    "gaps between kernels": "gaps between kernels, where the host is late",
    "logging": "logging, in a step that logs",
}


def budget_sentences(cell: Record) -> list[str]:
    """Where a step's time went, in words, the largest loss first."""
    seconds, wall = cell["budget"]["seconds"], cell["budget"]["wall_s"]
    work = ("GEMM", "attention", "loss, its GEMM")
    lost = sorted(((s, name) for name, s in seconds.items() if name not in work and s > 0), reverse=True)
    lines = [f"{sum(seconds[name] for name in work) / wall:.1%} of the step is matrix products and attention."]
    lines += [f"You lose {s / wall:.1%} to {_IN_WORDS.get(name, name)}." for s, name in lost]
    sustained = 1e12 * sum(cell["matmul_tflops"]) / len(cell["matmul_tflops"])
    rates = work_of(cell)
    reached = [f"{name} {rates[name] / seconds[name] / sustained:.0%}" for name in work if seconds[name] > 0]
    return [*lines, f"Of the sustained matmul rate reach: {'; '.join(reached)}."]


def budget_name(cell: Record) -> str:
    """Of its picture, without the ending; a variant does not take the recipe's."""
    name = f"budget_{cell['row']}_{cell['data']}_{cell['attention']}"
    if cell["recipe"]:
        return name
    variant = "_".join([str(cell["micro_batch_tokens"]), *cell["overrides"]])
    return f"{name}_{re.sub(r'[^A-Za-z0-9.=_-]+', '-', variant)}"


def budget_table(cell: Record) -> str:
    """The time budget of one step; its parts add up to the step's wall time."""
    found = cell["budget"]
    wall, work = found["wall_s"], work_of(cell)
    lines = _header("part", "ms", "of the step", "TFLOP/s", "largest kernels")
    for name, s in found["seconds"].items():
        kernels = "; ".join(f"`{k['name'][:48]}` {k['seconds'] / wall:.1%}" for k in found["kernels"].get(name, [])[:2])
        rate = f"{work[name] / s / 1e12:.0f}" if name in work and s > 0 else ""
        lines.append(_line([name, f"{1e3 * s:,.1f}", f"{s / wall:.1%}", rate, kernels]))
    lines.append(_line(["the step", f"{1e3 * wall:,.1f}", f"{sum(found['seconds'].values()) / wall:.1%}", "", ""]))
    unknown = [k["name"] for k in found["kernels"].get("unknown kernels", [])]
    lines += ["", f"Under the profiler; a timed step takes {1e3 * found['timed_step_s']:,.0f} ms."]
    lines += [f"Unknown kernels: {', '.join(f'`{name}`' for name in unknown)}."] if unknown else []
    return "\n".join([*lines, "", *budget_sentences(cell)])


def work_of(cell: Record) -> dict[str, float]:
    """FLOPs of one step by part, as the kernels do them: attention's backward is 2.5 times its forward."""
    shape, tokens = cell["model"], cell["tokens"] / len(cell["step_seconds"])
    squares = cell["sum_len_sq"] / len(cell["step_seconds"])
    return {
        "GEMM": 6 * cell["block_matmul_params"] * tokens,
        "attention": 3.5 * 4 * shape["d_model"] * shape["n_layer"] * (squares + tokens) / 2,
        "loss, its GEMM": 6 * shape["padded_vocab_size"] * shape["d_model"] * tokens,
    }


def a100_expectation() -> str:
    """What the paper's figures mean for one A100, by its own formula: computed, not measured."""
    shapes = {"1.3b": (24, 2048, 16), "2.7b": (32, 2560, 20)}
    lines = _header("model, context", "TFLOP/s, `mfu`", "tokens/s of each A100", "days for 300B tokens on one")
    for row, (_, _, flash2) in PAPER.items():
        size, length = row.split("_")
        context = 1024 * int(length.removesuffix("k"))
        n_layer, d_model, heads = shapes[size]
        config = GPTConfig(
            vocab_size=50_257,
            max_positions=context,
            n_layer=n_layer,
            d_model=d_model,
            nheads_q=heads,
            position=Position.learned,
        )
        rate = flash2 * 1e12 / paper_flops(count_params(config), n_layer, d_model, 1, context)
        share = flash2 / A100_PEAK_TFLOPS
        lines.append(
            _line(
                [TITLES[row], f"{flash2:.0f}, {share:.0%}", f"{rate:,.0f}", f"{TRAINING_TOKENS / rate / 86_400:,.0f}"]
            )
        )
    return "\n".join(lines)
