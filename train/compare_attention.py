"""`python -m train.compare_attention`: the same run with several attention backends, their losses side by side.

Trains once per backend from the same seed on the same batches, and writes a JSON record and a plot of the losses and
of their distances from the first backend's. The yardstick of noise is a backend's own repeat: a second run of the
first backend whose initial weights are larger by one bf16 epsilon. Overrides are those of `python -m train`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from train import cli
from train.__main__ import COMMAND
from train.environment import environment
from train.schema import Attention, RunConfig

NOISE = "noise"  # the first backend again, from slightly larger weights


def losses(config: RunConfig) -> list[float]:
    """The training loss of every step, nats per token."""
    from train.fit import fit

    result = fit(config)
    return [result.losses[step] for step in range(1, result.step + 1)]


def compare(config: RunConfig, backends: Sequence[Attention], run_root: str) -> dict[str, list[float]]:
    """Losses by backend, and those of the noise run under the key `noise`."""
    trainer = replace(config.trainer, log_every=1, validate_every=0, sample_tokens=0, progress_bar=False)
    config = replace(config, run_root=run_root, overwrite=True, trainer=trainer)
    curves = {b.value: losses(replace(config, attention=b, name=b.value)) for b in backends}
    # A relative change of every initial weight by one bf16 epsilon: twice the most that one rounding moves it.
    std = config.model.init_std * (1 + torch.finfo(torch.bfloat16).eps)
    noise = replace(config, attention=backends[0], name=NOISE, model=replace(config.model, init_std=std))
    return curves | {NOISE: losses(noise)}


def distances(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Each curve's distance from the first: mean and largest over the steps, and at the end (last tenth's mean)."""
    base = torch.tensor(next(iter(curves.values())), dtype=torch.float64)
    out = {}
    for name, curve in list(curves.items())[1:]:
        apart = (torch.tensor(curve, dtype=torch.float64) - base).abs()
        end = apart[-max(1, len(apart) // 10) :]
        out[name] = {"mean": apart.mean().item(), "max": apart.max().item(), "end": end.mean().item()}
    return out


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Losses above, distances from the first curve below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    base_name, base = next(iter(curves.items()))
    for i, (name, curve) in enumerate(curves.items()):
        steps = range(1, len(curve) + 1)
        style = {"label": name, "linewidth": 1, "color": f"C{i}"}
        above.plot(steps, curve, **style)
        if name != base_name:
            below.semilogy(steps, [abs(a - b) for a, b in zip(curve, base, strict=True)], **style)
    above.set_ylabel("training loss, nats per token")
    below.set_ylabel(f"distance from {base_name}")
    below.set_xlabel("step")
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.compare_attention", description=__doc__)
    parser.add_argument("--backends", default="reference,fa2", help="the first is the one compared with")
    parser.add_argument("--output", type=Path, required=True, help="the JSON record; the plot lies beside it as .png")
    parser.add_argument("overrides", nargs="*", help="as for python -m train")
    options = parser.parse_args(arguments)
    try:
        backends = [Attention(name) for name in options.backends.split(",")]
        config = cli.build(COMMAND, options.overrides)
        with tempfile.TemporaryDirectory() as run_root:
            curves = compare(config, backends, run_root)
    except ValueError as error:
        print(f"train.compare_attention: error: {error}", file=sys.stderr)
        return cli.USER_ERROR
    apart = distances(curves)
    facts = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    record: dict[str, Any] = {
        "command": f"python -m train.compare_attention --backends {options.backends} {' '.join(options.overrides)}",
        "machine": {k: v for k, v in facts.items() if k not in ("hostname", "command")},
        "distance_from_first": apart,
        "losses": curves,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot(curves, options.output.with_suffix(".png"))
    for name, row in apart.items():
        figures = ", ".join(f"{key} {value:.2e}" for key, value in row.items())
        print(f"{name:>10}: {figures} nats from {backends[0].value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
