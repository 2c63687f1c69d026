"""`python -m train.compare_attention`: the same run with several attention backends, their losses side by side.

Trains once per backend from the same seed on the same batches, and writes a JSON record and a plot of the losses and
of their differences from the first backend's. The yardstick is a backend's own repeat: a second run of the first
backend whose initial weights are larger by one bf16 epsilon. A backend drifts whose mean difference, over the whole run
or over its last steps, exceeds the repeat's mean distance times `--factor`: the record says so, and the exit code is 1.
`fa2:sm80` is fa2 under FA2_ARCH=sm80, `fa2` the kernels that it takes by itself. Overrides are those of
`python -m train`; nothing is validated, saved or sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from train import build, cli
from train.__main__ import COMMAND
from train.environment import environment
from train.reproduce.kernels import check_attention
from train.schema import Attention, RunConfig

NOISE = "noise"  # the first backend again, from slightly larger weights
FAMILIES = ("sm80", "sm90")  # of fa2's kernels
LAST_STEPS = 100  # the end of a run, at most its second half
FACTOR = 3.0
Curves = dict[str, list[float]]


@dataclass(frozen=True)
class Backend:
    """An attention backend; `family` holds fa2 to one family of its kernels."""

    attention: Attention
    family: str | None = None

    @property
    def name(self) -> str:
        return self.attention.value if self.family is None else f"{self.attention.value}:{self.family}"


def parse_backends(text: str) -> list[Backend]:
    """`torch,fa2,fa2:sm80` as backends.

    Raises:
        ValueError: an unknown or repeated one.
    """
    known = [a.value for a in Attention] + [f"fa2:{family}" for family in FAMILIES]
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"--backends must be of {', '.join(known)}, got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"--backends must name each one once, got {text}")
    parts = [name.partition(":") for name in names]
    return [Backend(Attention(attention), family or None) for attention, _, family in parts]


@contextmanager
def kernels_of(backend: Backend) -> Iterator[None]:
    """FA2_ARCH, which fa2 reads at every call, as the backend asks for it; unset where it asks for none."""
    before = os.environ.pop("FA2_ARCH", None)
    if backend.family is not None:
        os.environ["FA2_ARCH"] = backend.family
    try:
        yield
    finally:
        os.environ.pop("FA2_ARCH", None)
        if before is not None:
            os.environ["FA2_ARCH"] = before


def losses(config: RunConfig) -> list[float]:
    """The training loss of every step, nats per token."""
    from lightning.pytorch import Callback

    from train.fit import fit

    result = fit(config, probe=Callback())  # a probed run neither validates nor saves: seconds and gigabytes each
    return [result.losses[step] for step in range(1, result.step + 1)]


def check(config: RunConfig, backends: Sequence[Backend]) -> None:
    """Whether every backend can serve, before the first one has trained.

    Raises:
        ValueError: one cannot.
    """
    for backend in backends:
        build.check(replace(config, attention=backend.attention))


def compare(config: RunConfig, backends: Sequence[Backend], run_root: str) -> Curves:
    """Losses by backend, and those of the noise run under the key `noise`."""
    trainer = replace(config.trainer, log_every=1, validate_every=0, sample_tokens=0, progress_bar=False)
    config = replace(config, run_root=run_root, overwrite=True, trainer=trainer)
    # A relative change of every initial weight by one bf16 epsilon: twice the most that one rounding moves it.
    std = config.model.init_std * (1 + torch.finfo(torch.bfloat16).eps)
    noisy = replace(config, model=replace(config.model, init_std=std))
    runs = [(b.name, b, config) for b in backends] + [(NOISE, backends[0], noisy)]
    curves = {}
    for name, backend, its_config in runs:
        with kernels_of(backend):
            curves[name] = losses(replace(its_config, attention=backend.attention, name=name.replace(":", "_")))
    return curves


def distances(curves: Curves) -> dict[str, dict[str, float]]:
    """Each curve against the first, nats per token.

    Returns:
        By name: `mean`, `max` and `end` of |difference|, `end` being its mean over the last steps; `drift` and
        `drift_end`, the means of the difference itself over all and over the last steps.
    """
    base = torch.tensor(next(iter(curves.values())), dtype=torch.float64)
    last = last_steps(len(base))
    out = {}
    for name, curve in list(curves.items())[1:]:
        difference = torch.tensor(curve, dtype=torch.float64) - base
        apart = difference.abs()
        out[name] = {
            "mean": apart.mean().item(),
            "max": apart.max().item(),
            "end": apart[-last:].mean().item(),
            "drift": difference.mean().item(),
            "drift_end": difference[-last:].mean().item(),
        }
    return out


def last_steps(steps: int) -> int:
    """How many steps the end of a run of so many is."""
    return min(LAST_STEPS, max(1, steps // 2))


def drift_limits(apart: dict[str, dict[str, float]], factor: float) -> dict[str, float]:
    """The largest `drift` and `drift_end` that count as none, nats.

    Of the noise run the distance counts and not the drift: the mean of a difference can be near 0 by chance.
    """
    noise = apart[NOISE]
    return {"drift": factor * noise["mean"], "drift_end": factor * noise["end"]}


def drifting(apart: dict[str, dict[str, float]], limits: dict[str, float]) -> list[str]:
    """The backends beyond a limit, or with a loss that is no number."""
    others = [name for name in apart if name != NOISE]
    return [name for name in others if not all(abs(apart[name][key]) <= limit for key, limit in limits.items())]


def attention_kernels(config: RunConfig, backend: Backend) -> list[str]:
    """The kernels of one call of the backend, forward and backward, in the model's heads; none on a CPU.

    A call of its own and after the runs, because a profiler slows every launch that comes after it. Where the
    profiler's library is missing it sees nothing.

    Raises:
        ValueError: another backend's kernels ran, or another family's.
    """
    device = build.resolve_device(config)
    if device.type == "cpu":
        return []
    config = replace(config, attention=backend.attention)
    name, attention = build.build_attention(config)
    dtype = build.compute_dtype(build.resolve_precision(config, device))
    model, context = config.model, config.batch.context
    heads = (model.nheads_q, model.kv_heads, model.kv_heads)
    q, k, v = (torch.randn(context, n, model.headdim, device=device, dtype=dtype, requires_grad=True) for n in heads)
    cu_seqlens = torch.tensor([0, context], dtype=torch.int32, device=device)
    with kernels_of(backend), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        out = attention(q, k, v, cu_seqlens, context)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize(device)
    ran = {event.name for event in profiler.events() or [] if event.device_type == DeviceType.CUDA}
    return check_kernels(backend, check_attention(name, ran, on_gpu=True)) if ran else []


def check_kernels(backend: Backend, ran: list[str]) -> list[str]:
    """The same names.

    Raises:
        ValueError: the forward or the backward pass ran none of the backend's family.
    """
    if backend.family is not None and (found := families(ran)) != dict.fromkeys(("fwd", "bwd"), backend.family):
        raise ValueError(f"{backend.name} must run kernels of {backend.family}, the profiler saw {found}")
    return ran


def families(kernels: Sequence[str]) -> dict[str, str]:
    """The family of fa2's kernel that served the forward and the backward pass, by their names."""
    found = [re.search(r"\bfa2::(sm\d+)::attention_(fwd|bwd)", name) for name in kernels]
    return {match[2]: match[1] for match in found if match}


def plot(curves: Curves, limits: dict[str, float], path: Path) -> None:
    """Losses above; below, each curve's difference from the first, and its distance on a logarithmic scale."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        3, 1, figsize=(9, 11), sharex=True, layout="constrained", gridspec_kw={"height_ratios": [3, 2, 2]}
    )
    above, middle, below = axes
    base_name, base = next(iter(curves.items()))
    window = max(1, len(base) // 25)
    steps = range(1, len(base) + 1)
    for i, (name, curve) in enumerate(curves.items()):
        label = f"{base_name}, weights + 1 bf16 epsilon" if name == NOISE else name
        style: dict[str, Any] = {"color": "0.6" if name == NOISE else f"C{i}"}
        if name != NOISE:
            # the later ones thinner and dashed, so that those beneath show
            above.plot(steps, curve, **style, alpha=0.25, linewidth=0.7)
            drawn = {"linewidth": max(1.2, 4.5 - 1.5 * i), "linestyle": ("-", "-", "--", ":")[min(i, 3)]}
            above.plot(steps, running_mean(curve, window), label=label, **style, **drawn)
        if name != base_name:
            difference = [a - b for a, b in zip(curve, base, strict=True)]
            middle.plot(steps, running_mean(difference, window), label=label, linewidth=1.2, **style)
            below.semilogy(steps, running_mean([abs(x) for x in difference], window), linewidth=1.2, **style)
    first = len(base) - last_steps(len(base)) + 1
    for start, key, steps_of in ((1, "drift", "all"), (first, "drift_end", "the last")):
        limit = limits[key]
        style = {"colors": "k", "linestyles": ":" if key == "drift" else "--", "linewidth": 1}
        middle.hlines([-limit, limit], start, len(base), label=f"limits of the mean over {steps_of} steps", **style)
    above.set_ylabel(f"training loss, nats per token\n(thick: mean of {window} steps)")
    middle.set_ylabel(f"difference from {base_name}\n(mean of {window} steps)")
    below.set_ylabel(f"distance from {base_name}\n(mean of {window} steps)")
    below.set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    above.legend(fontsize=8)
    middle.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those up to `window - 1` before it."""
    total = torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)
    end = torch.arange(1, len(values) + 1)
    begin = (end - window).clamp(min=0)
    return ((total[end] - total[begin]) / (end - begin)).tolist()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m train.compare_attention", description=__doc__)
    made.add_argument("--backends", default="reference,fa2", help="the first is the one compared with")
    made.add_argument("--factor", type=float, default=FACTOR, help="of the noise's mean distance: more is a drift")
    made.add_argument("--output", type=Path, required=True, help="the JSON record; the plot lies beside it as .png")
    made.add_argument("overrides", nargs="*", help="as for python -m train")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        backends = parse_backends(options.backends)
        config = cli.build(COMMAND, options.overrides)
        check(config, backends)
        with tempfile.TemporaryDirectory() as run_root:
            curves = compare(config, backends, run_root)
            summary = json.loads((Path(run_root) / NOISE / "summary.json").read_text(encoding="utf-8"))
    except ValueError as error:
        print(f"train.compare_attention: error: {error}", file=sys.stderr)
        return cli.USER_ERROR
    problems, kernels = [], {}
    for backend in backends:
        try:
            kernels[backend.name] = attention_kernels(config, backend)
        except (ValueError, RuntimeError) as error:  # the record of the runs is written all the same
            problems.append(str(error))
    apart = distances(curves)
    limits = drift_limits(apart, options.factor)
    drifts = drifting(apart, limits)
    facts = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    factor = "" if options.factor == FACTOR else f"--factor {options.factor:g} "
    overrides = " ".join(options.overrides)
    record: dict[str, Any] = {
        "command": f"python -m train.compare_attention --backends {options.backends} {factor}{overrides}",
        "machine": {k: v for k, v in facts.items() if k not in ("hostname", "command")},
        "n_params": summary["n_params"],
        "tokens_per_step": config.batch.global_batch_tokens,
        "kernels": kernels,
        "last_steps": last_steps(len(curves[NOISE])),
        "distance_from_first": apart,
        "limits": {"factor": options.factor, **limits},
        "drifting": drifts,
        "losses": curves,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot(curves, limits, options.output.with_suffix(".png"))
    for name, row in apart.items():
        figures = ", ".join(f"{key} {value:.2e}" for key, value in row.items())
        print(f"{name:>10}: {figures} nats from {backends[0].name}")
    print(f"{'limits':>10}: " + ", ".join(f"{key} {value:.2e}" for key, value in limits.items()))
    problems += [f"{name} drifts from {backends[0].name}: beyond {options.factor:g} times the noise" for name in drifts]
    for problem in problems:
        print(f"train.compare_attention: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
