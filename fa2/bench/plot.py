"""The paper's figure from a record: TFLOP/s over the sequence length, a column for each headdim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STYLE = {
    "fa2": ("black", "o"),
    "fa2_sm80": ("tab:red", "d"),
    "sdpa_flash": ("tab:blue", "s"),
    "sdpa_cudnn": ("tab:green", "^"),
    "eager": ("tab:gray", "x"),
}


def plot(record: dict[str, Any], path: Path) -> bool:
    """Write a PNG; False where matplotlib is missing or the record has no sweep."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["rows"] if row["suite"] == "paper"]
    headdims = sorted({row["headdim"] for row in rows})
    if not rows:
        return False
    lines = [(part, causal) for part in ("forward", "backward") for causal in (True, False)]
    figure, axes = pyplot.subplots(
        len(lines), len(headdims), figsize=(4 * len(headdims), 2.4 * len(lines)), squeeze=False, sharex=True
    )
    for i, (part, causal) in enumerate(lines):
        for j, headdim in enumerate(headdims):
            axis = axes[i][j]
            chosen = [r for r in rows if r["headdim"] == headdim and r["causal"] == causal]
            chosen.sort(key=lambda r: r["seqlen"])
            # Eager has no bare backward: its autograd one is drawn.
            readings = [(r["seqlen"], {**r.get(f"{part}_autograd", {}), **r.get(part, {})}) for r in chosen]
            for peer in dict.fromkeys(name for _, found in readings for name in found):
                named = [(seqlen, found[peer]) for seqlen, found in readings if peer in found]
                color, marker = STYLE.get(peer, (None, "d"))
                axis.plot(
                    [x for x, _ in named], [y["tflops"] for _, y in named], label=peer, color=color, marker=marker, ms=4
                )
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"headdim {headdim}, {part}, {'causal' if causal else 'full'}", fontsize=9)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("TFLOP/s")
    figure.suptitle(f"{record['machine']['device']}, 16k tokens, hidden 2048, bf16", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
