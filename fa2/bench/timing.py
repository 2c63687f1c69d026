"""How it is measured: CUDA events around each run, L2 flushed before it, calls interleaved in rounds, medians.

On a CPU the same code measures with the host's clock, so that it can be tried there.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]
FLUSH_bytes = 256 << 20  # several times the L2 of any GPU, as triton's do_bench has it


class Stopwatch:
    def __init__(self, device: str, flush_bytes: int = FLUSH_bytes) -> None:
        self.on_gpu = device.startswith("cuda")
        self.flush = torch.empty(flush_bytes // 4 if self.on_gpu else 1, dtype=torch.int32, device=device)

    def times(self, call: Call, runs: int) -> list[float]:
        """Milliseconds of each of `runs` runs, without a synchronisation between them."""
        if not self.on_gpu:
            marks = [time.perf_counter()]
            for _ in range(runs):
                call()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host gets ahead
        for start, end in events:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def interleaved(self, calls: Mapping[str, Call], rounds: int, runs: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Every call in each round, `runs` times in all: median ms, spread and n. Each round begins with another call,
        and every other one goes backwards: who runs behind a call that heats the GPU is slower.

        The spread is the difference between the rounds' own medians, over the median: what a single reading may be off.
        """
        for call in calls.values():
            call()
            call()
        by_round: dict[str, list[list[float]]] = {name: [] for name in calls}
        names = list(calls)
        for i in range(rounds):
            first = i * len(names) // rounds
            order = names[first:] + names[:first]
            for name in order if i % 2 == 0 else reversed(order):
                by_round[name].append(self.times(calls[name], -(-runs[name] // rounds)))
        result = {}
        for name, readings in by_round.items():
            median = statistics.median(t for times in readings for t in times)
            medians = [statistics.median(times) for times in readings]
            spread = (max(medians) - min(medians)) / median
            result[name] = {"ms": median, "spread": spread, "n": sum(map(len, readings))}
        return result


def matmul_ceiling(device: str, seconds: float = 1.0, size: int = 8192) -> float:
    """TFLOP/s of a bf16 matrix product of random numbers, sustained: the second half of `seconds`."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    watch = Stopwatch(device)
    once = statistics.median(watch.times(lambda: a @ b, 3)[1:])
    runs = max(2, int(1e3 * seconds / once))
    times = watch.times(lambda: a @ b, runs)
    return 2 * size**3 / statistics.median(times[len(times) // 2 :]) / 1e9


def kernel_names(call: Call) -> list[str]:
    """Names of the kernels that one run launches; empty where the profiler sees none."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sorted({event.key for event in profile.key_averages() if "Memcpy" not in event.key})


def host_microseconds(call: Call, device: str, runs: int = 100) -> float:
    """Microseconds of host time a call, the device running behind: with more runs its queue of 1024 kernels is full."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    for _ in range(10):
        call()
    readings = []
    for _ in range(15):
        synchronize()
        started = time.perf_counter()
        for _ in range(runs):
            call()
        readings.append((time.perf_counter() - started) / runs * 1e6)
        synchronize()
    return statistics.median(readings)
