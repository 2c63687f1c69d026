"""The pictures: ours beside the paper's, and a step's time budget beside the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.reproduce.kernels import Class
from train.reproduce.tables import A100_PEAK_TFLOPS, BACKENDS, PAPER, TITLES, work_of

Record = dict[str, Any]
_COLORS = {
    "eager": "tab:gray",
    "sdpa_flash": "tab:blue",
    "sdpa_cudnn": "tab:green",
    "torch": "tab:cyan",
    "fa2": "black",
    "reference": "tab:purple",
}


def plot_table(record: Record, path: Path) -> bool:
    """Bars of mfu for each row and backend, and lines at the paper's; gemm_util where no peak is known.

    Returns:
        False where matplotlib is missing or no cell was measured.
    """
    cells = [cell for cell in record["cells"] if cell["status"] == "ok"]
    pyplot = _pyplot()
    if pyplot is None or not cells:
        return False
    key = "mfu" if all(cell["mfu"] is not None for cell in cells) else "gemm_util"
    there = {(cell["row"], cell["data"]) for cell in cells}
    rows = [(row, data) for data in ("dense", "packed") for row in TITLES if (row, data) in there]
    figure, axis = pyplot.subplots(figsize=(max(7.0, 1.6 * len(rows)), 4.6), layout="constrained")
    for at, row in enumerate(rows):
        here: dict[str, Record] = {}
        for cell in cells:
            name = cell["attention"]
            if (cell["row"], cell["data"]) == row and (name not in here or cell["recipe"]):
                here[name] = cell
        width = 0.8 / max(4, len(here))
        names = [name for name in BACKENDS if name in here]
        for i, name in enumerate(names):
            place = at + (i - (len(names) - 1) / 2) * width
            axis.bar([place], [100 * here[name][key]], 0.95 * width, color=_COLORS[name], label=BACKENDS[name])
    if key == "mfu":
        for i, (title, style) in enumerate((("no flash", ":"), ("FlashAttention 1", "--"), ("FlashAttention-2", "-"))):
            lines = [(at, PAPER[row][i]) for at, (row, data) in enumerate(rows) if data == "dense" and row in PAPER]
            if lines:
                axis.hlines(
                    [100 * tflops / A100_PEAK_TFLOPS for _, tflops in lines],
                    [at - 0.45 for at, _ in lines],
                    [at + 0.45 for at, _ in lines],
                    color="tab:red",
                    linestyle=style,
                    label=f"the paper's A100, {title}",
                )
    axis.set_xticks(range(len(rows)), [f"{TITLES[row]}\n{data}" for row, data in rows])
    axis.set_ylabel(f"{key}, %")
    axis.set_title(record["machine"]["gpu"] or record["machine"]["cpu"], fontsize=10)
    labelled = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))  # each once
    figure.legend(labelled.values(), labelled.keys(), fontsize=8, ncols=4, loc="outside lower center")
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def plot_budget(cell: Record, path: Path) -> bool:
    """A step's parts as one bar, and the roofline with what its matrix products, attention and optimiser reach.

    Returns:
        False where matplotlib is missing.
    """
    pyplot = _pyplot()
    if pyplot is None:
        return False
    found = cell["budget"]
    wall = found["wall_s"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5), width_ratios=(1, 1.6), layout="constrained")
    bottom = 0.0
    for name, seconds in found["seconds"].items():
        share = 100 * seconds / wall
        left.bar([0], [share], bottom=[bottom], color=_part_color(name), label=f"{name} {share:.1f}%")
        bottom += share
    left.set_xlim(-0.5, 1.6)
    left.set_xticks([])
    left.set_ylim(0, 100)
    left.set_ylabel(f"% of a step of {wall:.2f} s")
    left.legend(*(list(reversed(part)) for part in left.get_legend_handles_labels()), fontsize=8, loc="center right")
    _roofline(right, cell)
    figure.suptitle(f"{TITLES[cell['row']]} {cell['data']}, {BACKENDS[cell['attention']]}", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _part_color(name: str) -> Any:
    """The same in both pictures."""
    from matplotlib import colormaps

    return colormaps["tab20"]([kind.value for kind in Class].index(name))


def _roofline(axis: Any, cell: Record) -> None:
    found = cell["budget"]
    slope = found["copy_bytes_per_s"] / 1e12  # TFLOP/s at one FLOP a byte
    ceilings = {"sustained matrix products": sum(cell["matmul_tflops"]) / len(cell["matmul_tflops"])}
    if cell["peak_tflops"]:
        ceilings["datasheet peak"] = cell["peak_tflops"]
    highest = max(ceilings.values())
    left, right = 0.1, 1e5
    for (name, height), style in zip(ceilings.items(), ("-", "--"), strict=False):
        corner = height / slope
        axis.plot([left, corner, right], [left * slope, height, height], "k" + style, linewidth=1, label=name)
    lowest = left * slope
    for name, (flops, moved) in intensities(cell).items():
        seconds = found["seconds"].get(name, 0.0)
        if seconds > 0:
            reached = flops / seconds / 1e12
            lowest = min(lowest, reached / 2)
            axis.plot([flops / moved], [reached], "o", color=_part_color(name), label=name)
    step = sum(work_of(cell).values()) / found["wall_s"] / 1e12
    axis.axhline(step, color="tab:red", linewidth=1, linestyle=":", label="the whole step")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(left, right)
    axis.set_ylim(lowest, 2 * highest)
    axis.set_xlabel("FLOPs a byte that must move")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower right")


def intensities(cell: Record) -> dict[str, tuple[float, float]]:
    """(FLOPs, bytes that must move at least) of one step, for the parts where both are known."""
    shape, work = cell["model"], work_of(cell)
    steps = len(cell["step_seconds"])
    tokens, micro_batch = cell["tokens"] / steps, cell["micro_batch_tokens"]
    d_model, n_layer = shape["d_model"], shape["n_layer"]
    # A weight is read twice and its gradient written once in each micro-batch, all in 16 bits; and of the activations
    # each product reads one side and writes another, three times.
    weights = cell["block_matmul_params"]
    widths = sum(n + k for n, k in cell["gemm_widths"])
    gemm_bytes = 2 * (3 * weights * tokens / micro_batch + 3 * n_layer * widths * tokens)
    # forward: q k v out; backward: q k v out dout read, dq dk dv written
    attention_bytes = 2 * 12 * d_model * n_layer * tokens
    # AdamW in fp32: weight, gradient and both moments read, all but the gradient written; about 14 operations
    params = cell["n_params"]
    return {
        "GEMM": (work["GEMM"], gemm_bytes),
        "attention": (work["attention"], attention_bytes),
        "optimiser": (14.0 * params, 28.0 * params),
    }


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
