"""The page that says what a run did: `report.html` (self-contained) and `curves.png`, from the run directory alone.

`fit` writes the files below as it goes, this module only reads them, and any of them may be missing: a killed run
has a report too (`python -m train.report run=runs/default`). JSON numbers are raw (no units, no formatting), NaN and
infinity are null.

- `metrics.csv`: rows of `METRICS_COLUMNS`; an empty cell was not measured at that step (most rows have no `val_loss`).
  `time` is seconds of training since step 0, summed over resumes; `mfu`, `mfu_exact`, `gemm_util` are fractions of 1;
  `loss`, `val_loss` are nats a token; `skipped_steps` counts the non-finite steps so far.
- `config.yaml`: the resolved config.
- `environment.json`: one flat object, shown as it is: `python`, `torch`, `cuda`, `lightning`, `gpu` (name), `gpus`
  (number), `driver`, `cpu`, `cpu_cores`, `hostname`, `commit` ("+changes" when dirty), `attention` (resolved),
  `precision`, `compile`, `command`.
- `packing.json`: what `data.stats.packing_stats` returned, one flat object, shown as it is.
- `data.json`: the part of the data's manifest worth showing: source, documents, tokens, bytes, duplicates dropped.
- `summary.json`: headline figures, all optional: `status` (finished, interrupted, failed), `steps`, `tokens`,
  `seconds`, `n_params`, `loss`, `val_loss`, `val_bits_per_byte`, `unigram_bits_per_byte`, `gzip_bits_per_byte`,
  `tokens_per_s`, `mfu`, `mfu_exact`, `gemm_util`, `skipped_steps`, `nonfinite_steps` (list), `checkpoint` (path),
  `peak_memory_bytes`.
- `samples.txt`: what the model wrote, plain text.
"""

from __future__ import annotations

import html
import json
import math
import sys
from collections.abc import Callable, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from string import Template
from typing import Any

METRICS_COLUMNS = (
    "step",
    "tokens",
    "loss",
    "val_loss",
    "val_bits_per_byte",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "mfu_exact",
    "gemm_util",
    "skipped_steps",
    "time",
)

ACCENT = "#1f6feb"
INK = "#24292f"
MUTED = "#8c959f"
_MOST_SAMPLE_CHARACTERS = 20_000

Rows = list[dict[str, float]]


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` and `curves.png` into the run directory and returns the page's path.

    Raises:
        FileNotFoundError: there is no such directory, or it holds neither metrics nor a config.
    """
    from train.metrics import read_metrics

    run_dir = Path(run_dir)
    if not (run_dir / "metrics.csv").exists() and not (run_dir / "config.yaml").exists():
        raise FileNotFoundError(f"{run_dir} is no run directory: it has neither metrics.csv nor config.yaml")
    rows = read_metrics(run_dir / "metrics.csv")
    summary = _summary(_read_json(run_dir / "summary.json"), rows)
    page = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8")).substitute(
        name=html.escape(run_dir.resolve().name),
        status=html.escape(_status(summary)),
        tiles=_tiles(summary),
        curves="".join(f'<figure class="curve">{_svg(chart, rows)}</figure>' for chart in CHARTS if chart[2](rows))
        or "<p>No metrics were written yet.</p>",
        nonfinite=_nonfinite(summary),
        compression=_compression(summary),
        data=_table("Data", _data_facts(_read_json(run_dir / "data.json"))),
        packing=_table("Packing", _read_json(run_dir / "packing.json")),
        environment=_table("Environment", _read_json(run_dir / "environment.json")),
        samples=_text("Samples", run_dir / "samples.txt"),
        config=_text("Resolved configuration", run_dir / "config.yaml"),
    )
    if rows:
        _write_png(run_dir / "curves.png", rows)
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


# --- figures -------------------------------------------------------------------------------------------------------


def _series(rows: Rows, column: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[column]) for row in rows if math.isfinite(row.get(column, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


def _draw_loss(axes: Any, rows: Rows) -> None:
    axes.plot(*_series(rows, "loss"), color=ACCENT, linewidth=1.4, label="training")
    steps, values = _series(rows, "val_loss")
    if values:
        axes.plot(steps, values, color=INK, linewidth=1.2, marker="o", markersize=4, label="validation")
        axes.annotate(f"{values[-1]:.3f}", (steps[-1], values[-1]), (0, 7), textcoords="offset points", ha="right")
    _, losses = _series(rows, "loss")
    if losses:
        # the first steps fall from ln(vocabulary); the rest of the curve is what a reader looks at
        settled = sorted(losses)[: max(1, int(len(losses) * 0.97))]
        low, high = min([*settled, *values]), max([*settled, *values])
        axes.set_ylim(low - 0.05 * (high - low) - 1e-6, high + 0.08 * (high - low) + 1e-6)
    axes.legend(frameon=False)


def _draw_bits(axes: Any, rows: Rows) -> None:
    steps, values = _series(rows, "val_bits_per_byte")
    axes.plot(steps, values, color=ACCENT, linewidth=1.4, marker="o", markersize=4)
    axes.annotate(f"{values[-1]:.3f}", (steps[-1], values[-1]), (0, 7), textcoords="offset points", ha="right")
    axes.margins(y=0.2)


def _draw_utilisation(axes: Any, rows: Rows) -> None:
    for column, color, style in (("gemm_util", ACCENT, "-"), ("mfu", INK, "-"), ("mfu_exact", MUTED, "--")):
        steps, values = _series(rows, column)
        if values:
            axes.plot(steps, [100 * v for v in values], color=color, linestyle=style, linewidth=1.4, label=column)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_line(column: str) -> Callable[[Any, Rows], None]:
    def draw(axes: Any, rows: Rows) -> None:
        axes.plot(*_series(rows, column), color=ACCENT, linewidth=1.4)
        axes.set_ylim(bottom=0)

    return draw


def _draw_grad_norm(axes: Any, rows: Rows) -> None:
    _, values = _series(rows, "grad_norm")
    axes.plot(*_series(rows, "grad_norm"), color=ACCENT, linewidth=1.2)
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _has(*columns: str) -> Callable[[Rows], bool]:
    return lambda rows: any(_series(rows, column)[0] for column in columns)


# (title, unit, whether there is something to draw, how)
CHARTS: tuple[tuple[str, str, Callable[[Rows], bool], Callable[[Any, Rows], None]], ...] = (
    ("Loss", "nats a token", _has("loss", "val_loss"), _draw_loss),
    ("Utilisation", "%", _has("mfu", "mfu_exact", "gemm_util"), _draw_utilisation),
    ("Throughput", "tokens a second", _has("tokens_per_s"), _draw_line("tokens_per_s")),
    ("Validation", "bits per byte", _has("val_bits_per_byte"), _draw_bits),
    ("Learning rate", "", _has("lr"), _draw_line("lr")),
    ("Gradient norm", "before clipping", _has("grad_norm"), _draw_grad_norm),
)


def _style() -> Any:  # matplotlib types the keys of rc_context one by one
    return {
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": "#d0d7de",
        "axes.labelcolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.formatter.useoffset": False,
        "grid.color": "#eaeef2",
        "grid.linewidth": 0.8,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "svg.fonttype": "none",  # text stays text: the reader's own font, and a tenth of the size
    }


def _draw(axes: Any, chart: tuple[str, str, Callable[[Rows], bool], Callable[[Any, Rows], None]], rows: Rows) -> None:
    title, unit, _, draw = chart
    draw(axes, rows)
    axes.set_title(title)
    axes.set_title(unit, loc="right", color=MUTED, fontsize=8.5, fontweight="normal")
    axes.set_xlabel("step")
    axes.margins(x=0.02)


def _svg(chart: Any, rows: Rows) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        _draw(figure.subplots(), chart, rows)
        out = StringIO()
        # ids are hashed with this salt: two figures in one page must not share clip paths, and runs must compare
        matplotlib.rcParams["svg.hashsalt"] = chart[0]
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _write_png(path: Path, rows: Rows) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    charts = [chart for chart in CHARTS if chart[2](rows)]
    if not charts:
        return
    with matplotlib.rc_context(_style()):
        height = math.ceil(len(charts) / 2)
        figure = Figure(figsize=(11.2, 3.0 * height), layout="constrained")
        grid = figure.subplots(height, 2, squeeze=False).flatten()
        for axes, chart in zip(grid, charts, strict=False):
            _draw(axes, chart, rows)
        for axes in grid[len(charts) :]:
            axes.set_visible(False)
        out = BytesIO()
        figure.savefig(out, format="png", dpi=130)
    path.write_bytes(out.getvalue())


# --- words and numbers ---------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; nothing where the file is missing or torn by a kill."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _summary(written: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """What `fit` wrote at its end; from the metrics where it did not come to that."""
    summary: dict[str, Any] = {}
    for column in METRICS_COLUMNS:
        _, values = _series(rows, column)
        if values:
            summary["seconds" if column == "time" else "steps" if column == "step" else column] = values[-1]
    known = {key: value for key, value in written.items() if value is not None}
    if summary.get("steps", 0) > known.get("steps", math.inf):  # an earlier part's; this one was killed
        return known | {"status": "not finished"} | summary
    return summary | known


def _data_facts(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a reader wants to know of a manifest, in words; anything else as it is."""
    source, splits, counts = (manifest.get(key) for key in ("source", "splits", "counts"))
    if not isinstance(source, dict) or not isinstance(splits, dict):
        return manifest
    facts: dict[str, Any] = {"source": source.get("kind")}
    facts |= {key: value for key, value in source.items() if key in ("root", "paths", "name", "config", "python")}
    for split, title in (("train", "training"), ("validation", "validation")):
        size = splits.get(split, {})
        facts[title] = ", ".join(
            f"{_value(size[key])} {key}" for key in ("documents", "tokens", "bytes") if size.get(key)
        )
    if isinstance(counts, dict):
        facts["left out"] = (
            ", ".join(f"{_value(n)} {why}" for why, n in counts.items() if n and why != "read") or "none"
        )
    tokenizer = manifest.get("tokenizer")
    if isinstance(tokenizer, dict):
        facts["vocabulary"] = tokenizer.get("vocab_size")
    return facts | {"fingerprint": manifest.get("fingerprint")}


def _status(summary: dict[str, Any]) -> str:
    parts = [str(summary.get("status", "not finished"))]
    if "steps" in summary:
        parts.append(f"{summary['steps']:,.0f} steps")
    if "tokens" in summary:
        parts.append(f"{_number(summary['tokens'])} tokens")
    if "seconds" in summary:
        parts.append(_duration(summary["seconds"]))
    return " · ".join(parts)


def _tiles(summary: dict[str, Any]) -> str:
    """The figures a reader looks for first."""
    percent, plain = (lambda v: f"{100 * v:.1f}%"), (lambda v: f"{v:.3f}")
    shown: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("val_bits_per_byte", "validation bits per byte", plain),
        ("val_loss", "validation loss", plain),
        ("loss", "training loss", plain),
        ("tokens_per_s", "tokens a second", _number),
        ("gemm_util", "gemm_util", percent),
        ("mfu", "mfu", percent),
        ("mfu_exact", "mfu_exact", percent),
        ("n_params", "parameters", _number),
        ("peak_memory_bytes", "peak device memory", lambda v: f"{v / (1 << 30):.1f} GiB"),
    )
    tiles = [
        f'<div class="tile"><b>{form(summary[key])}</b><span>{label}</span></div>'
        for key, label, form in shown
        if isinstance(summary.get(key), int | float)
    ]
    return "".join(tiles)


def _compression(summary: dict[str, Any]) -> str:
    """Bits per byte beside what a unigram model and gzip reach on the same text."""
    entries = [
        (label, summary[key])
        for key, label in (
            ("val_bits_per_byte", "this model"),
            ("gzip_bits_per_byte", "gzip -9"),
            ("unigram_bits_per_byte", "unigram model"),
        )
        if isinstance(summary.get(key), int | float)
    ]
    if len(entries) < 2:
        return ""
    longest = max(value for _, value in entries)
    bars = "".join(
        f'<div class="bar{" own" if label == "this model" else ""}"><span>{label}</span>'
        f'<i style="width:{60 * value / longest:.1f}%"></i><b>{value:.3f}</b></div>'
        for label, value in entries
    )
    return f"<section><h2>Bits per byte on the validation text</h2>{bars}<p>Lower is better.</p></section>"


def _nonfinite(summary: dict[str, Any]) -> str:
    skipped = summary.get("skipped_steps")
    if skipped is None:
        return ""
    if not skipped:
        return '<p class="note">No step had a non-finite loss or gradient.</p>'
    steps = summary.get("nonfinite_steps") or []
    where = f": steps {', '.join(map(str, steps[:50]))}" if steps else ""
    return f'<p class="note warn">{skipped:,.0f} steps had a non-finite loss or gradient and were skipped{where}.</p>'


def _table(title: str, values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(key.replace('_', ' '))}</th><td>{html.escape(_value(value))}</td></tr>"
        for key, value in _flat(values)
        if value is not None
    )
    return f"<section><h2>{title}</h2><table>{rows}</table></section>" if rows else ""


def _text(title: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(text) > _MOST_SAMPLE_CHARACTERS:
        text = "…" + text[-_MOST_SAMPLE_CHARACTERS:]
    return f"<section><h2>{title}</h2><pre>{html.escape(text.strip())}</pre></section>"


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{key} ")
        elif not (isinstance(value, list) and value and isinstance(value[0], dict)):  # shard by shard is no headline
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value)
    return str(value)


def _number(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main(argv: Sequence[str] | None = None) -> int:
    from train import cli
    from train.schema import ReportConfig

    def run(config: ReportConfig) -> None:
        assert config.run is not None, "ReportConfig refuses null"
        print(write_report(Path(config.run)))

    return cli.main(cli.Command("train.report", "report", ReportConfig, run, literal=("run",)), argv)


if __name__ == "__main__":
    sys.exit(main())
