"""Where the wall time of one optimiser step goes, from a trace of torch's profiler: the parts add up to the step.

Every kernel belongs to one class, by the range it was launched in or by its name (`kernels.py`). Where kernels overlap,
the one that began first has the time. What is left is idle: before the first kernel the host prepares data, after the
last one it logs, between them the host launches too slowly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from train.reproduce.kernels import Class, class_of_kernel, class_of_range

STEP = "reproduce.step"  # the range that is taken apart
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("user_annotation", "cpu_op", "python_function")
_LISTED = 12  # kernels of a class that the record names
_COPIES = (Class.data, Class.logging)


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill on the GPU; times in microseconds of the trace's clock."""

    name: str
    start: float
    end: float
    launched: float | None  # when the host asked for it; None where the trace does not say


@dataclass
class Budget:
    """Seconds by class; they add up to `wall`."""

    wall: float
    seconds: dict[Class, float]
    kernels: dict[Class, list[tuple[str, float, int]]]  # (name, seconds, launches), the longest first

    def share(self, kind: Class) -> float:
        return self.seconds.get(kind, 0.0) / self.wall

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "wall_s": self.wall,
            "seconds": {kind.value: self.seconds.get(kind, 0.0) for kind in Class},
            "kernels": {
                kind.value: [{"name": name[:160], "seconds": s, "launches": n} for name, s, n in found[:_LISTED]]
                for kind, found in self.kernels.items()
            },
        }


def read_trace(trace: dict[str, Any]) -> Budget:
    """The budget of the range `reproduce.step` in a Chrome trace.

    Raises:
        ValueError: the range, or every kernel in it, is missing.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == STEP]
    if not steps:
        raise ValueError(f"budget must be of a trace with the range {STEP!r}, got one without")
    begin = float(steps[-1]["ts"])
    end = begin + float(steps[-1]["dur"])
    launches = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = [
        Kernel(
            e["name"],
            float(e["ts"]),
            float(e["ts"]) + float(e["dur"]),
            launches.get(e.get("args", {}).get("correlation")),
        )
        for e in events
        if e.get("cat") in _ON_GPU
    ]
    kernels = sorted((k for k in kernels if k.end > begin and k.start < end), key=lambda k: k.start)
    if not kernels:
        raise ValueError("budget must be of a step with kernels: the profiler recorded none (is CUPTI there?)")
    return _divide(kernels, _ranges(events), begin, end)


def _ranges(events: Iterable[dict[str, Any]]) -> list[tuple[Class, list[tuple[float, float]]]]:
    """Per class, the disjoint times in which the host was in one of its ranges, in order."""
    found: dict[Class, list[tuple[float, float]]] = defaultdict(list)
    kinds: dict[str, Class | None] = {}  # a trace has few names and many events
    for event in events:
        if event.get("cat") not in _ON_HOST:
            continue
        name = event["name"]
        if name not in kinds:
            kinds[name] = class_of_range(name)
        kind = kinds[name]
        if kind is not None:
            found[kind].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    return [(kind, _union(times)) for kind, times in found.items()]


def _union(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(times):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _inside(times: Sequence[tuple[float, float]], moment: float) -> bool:
    at = bisect_right(times, (moment, float("inf"))) - 1
    return at >= 0 and moment <= times[at][1]


def classify(kernel: Kernel, ranges: Iterable[tuple[Class, list[tuple[float, float]]]]) -> Class:
    """The class of one kernel: that of the range it was launched in, otherwise that of its name."""
    by_name = class_of_kernel(kernel.name)
    if by_name in _COPIES or kernel.launched is None:
        return by_name
    for kind, times in ranges:
        if _inside(times, kernel.launched):
            return Class.loss_gemm if kind is Class.loss and by_name is Class.gemm else kind
    return by_name


def _divide(
    kernels: Sequence[Kernel], ranges: list[tuple[Class, list[tuple[float, float]]]], begin: float, end: float
) -> Budget:
    seconds: dict[Class, float] = defaultdict(float)
    per_name: dict[Class, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0]))
    classes = [classify(kernel, ranges) for kernel in kernels]
    computing = [i for i, kind in enumerate(classes) if kind not in _COPIES]
    first, last = (computing[0], computing[-1]) if computing else (0, len(kernels) - 1)
    busy_until = begin
    for i, (kernel, kind) in enumerate(zip(kernels, classes, strict=True)):
        idle = max(0.0, min(kernel.start, end) - busy_until)
        seconds[Class.data if i <= first else Class.logging if i > last else Class.gaps] += idle / 1e6
        own = max(0.0, min(kernel.end, end) - max(kernel.start, busy_until)) / 1e6
        seconds[kind] += own
        entry = per_name[kind][kernel.name]
        entry[0] += own
        entry[1] += 1
        busy_until = max(busy_until, min(kernel.end, end))
    seconds[Class.logging] += max(0.0, end - busy_until) / 1e6
    listed = {
        kind: sorted(((name, s, int(n)) for name, (s, n) in names.items()), key=lambda entry: -entry[1])
        for kind, names in per_name.items()
    }
    return Budget((end - begin) / 1e6, dict(seconds), listed)
