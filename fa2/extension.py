"""Finds the CUDA extension, builds it once where there is none, loads it, and says which kernels it holds.

Looked for in this order: beside this file (a wheel, or `python -m fa2.build --out fa2`), then in the cache. A library
of other sources than these is passed over. Nothing here is done before the first call on a GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fa2 import nvcc
from fa2.checks import MAX_HEADDIM

# The operators with CUDA kernels, known without the library: nothing is built for the sake of one that has none.
CUDA_OPS = frozenset({"fwd", "bwd"})


@dataclass(frozen=True)
class Kernel:
    """A row of the extension's dispatch table."""

    op: str
    family: str  # folder of csrc/
    dtype: str  # float16 or bfloat16
    max_headdim: int  # serves multiples of 8 up to this
    min_sm: int  # compute capability, 10 * major + minor, inclusive
    max_sm: int
    shared_bytes: int  # shared memory of a thread block, which the GPU must grant


def architectures_for(capability: tuple[int, int]) -> tuple[str, ...]:
    """What to compile for one GPU: its own code where there is some, else PTX, which the driver compiles."""
    if capability[0] == 8:
        return ("sm_80",)
    return ("sm_90", "sm_90a") if capability == (9, 0) else ("compute_80",)


def _matches(library: Path, architectures: Sequence[str]) -> bool:
    """Whether this library was built from these sources and holds the architectures."""
    manifest = library.with_name(nvcc.MANIFEST)
    try:
        made = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return False
    return (
        library.is_file()
        and made.get("source_key") == nvcc.source_key()
        and set(architectures) <= set(made.get("architectures", ()))
    )


def find_library(architectures: Sequence[str]) -> Path | None:
    """A built extension that serves these architectures, or None."""
    cached = [nvcc.cached_library(nvcc.ALL), nvcc.cached_library(architectures)]
    candidates = [Path(__file__).with_name(nvcc.LIBRARY), *cached]
    return next((path for path in candidates if _matches(path, architectures)), None)


def build_into_cache(architectures: Sequence[str]) -> Path:
    """Build into the cache, once: other processes wait for the one that holds the lock and take what it made.

    Raises nvcc.BuildError; a process that waited gets the failure of the one that tried.
    """
    library = nvcc.cached_library(architectures)
    library.parent.mkdir(parents=True, exist_ok=True)
    failure = library.with_name("failure.txt")
    started = time.time()
    with open(library.with_name("lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _matches(library, architectures):
            return library
        if failure.is_file() and failure.stat().st_mtime >= started:
            raise nvcc.BuildError(failure.read_text())
        units = len(nvcc.plan(nvcc.CSRC, architectures, Path("torch")))
        _say(
            f"building the CUDA extension for {', '.join(architectures)}, once: {units} units of 2 to 10 s of one core"
        )
        try:
            built = nvcc.compile_extension(library.parent, architectures)
        except nvcc.BuildError as error:
            failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)
        _say(f"built in {built.seconds:.0f} s: {library}")
    return library


def _say(text: str) -> None:
    print(f"fa2: {text}", file=sys.stderr, flush=True)


@functools.cache
def load_library(path: Path) -> ctypes.CDLL:
    """Load a built extension; its operators become `torch.ops.fa2`'s CUDA kernels. Works on a CPU build of torch."""
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    library.fa2_kernels.restype = ctypes.c_char_p
    return library


def table(library: ctypes.CDLL) -> list[Kernel]:
    """The dispatch table of a loaded extension."""
    return [Kernel(**row) for row in json.loads(library.fa2_kernels())]


@functools.cache
def _load_for(capability: tuple[int, int]) -> ctypes.CDLL:
    # One library a process: operators can be registered once. GPUs of two kinds in one process need a full build.
    architectures = architectures_for(capability)
    if _loaded:
        return _loaded[0]
    library = load_library(find_library(architectures) or build_into_cache(architectures))
    _loaded.append(library)
    return library


_loaded: list[ctypes.CDLL] = []


@functools.cache
def load(device_index: int) -> ctypes.CDLL:
    """The extension, built if need be, ready for this GPU. Raises RuntimeError with what is wrong."""
    try:
        library = _load_for(torch.cuda.get_device_capability(device_index))
    except nvcc.BuildError as error:
        raise RuntimeError(f"fa2: the CUDA extension is not built and cannot be built here: {error}") from None
    text = ctypes.create_string_buffer(1024)
    with torch.cuda.device(device_index):
        if library.fa2_problem_on(device_index, text, len(text)):
            raise RuntimeError(f"fa2: {text.value.decode()}")
    return library


def kernels() -> list[Kernel]:
    """The CUDA kernels that exist, one row each; loads the extension, building it first where there is none."""
    if _loaded:
        return table(_loaded[0])
    if torch.cuda.is_available():
        return table(load(torch.cuda.current_device()))
    return table(load_library(find_library(nvcc.ALL) or build_into_cache(nvcc.ALL)))


def _cuda_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# Dynamo evaluates these two while it traces and keeps the answer: neither depends on a tensor's values.


@torch.compiler.assume_constant_result
def why_unavailable(device: str, dtype: torch.dtype, headdim: int) -> str | None:
    """Why the attention kernels cannot serve these inputs, None when they can (perhaps after a build)."""
    where = torch.device(device)
    if where.type != "cuda":
        return f"the CUDA attention kernels need a CUDA device, got {str(where)!r}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the CUDA attention kernels need float16 or bfloat16, got {dtype}"
    if headdim > MAX_HEADDIM:
        return f"the CUDA attention kernels need a headdim of at most {MAX_HEADDIM}, got {headdim}"
    if not {"fwd", "bwd"} <= CUDA_OPS:
        return (
            f"no kernel for fwd and bwd on CUDA; have {', '.join(sorted(CUDA_OPS))}"
            " (torch's scaled_dot_product_attention or fa2.reference serve until then)"
        )
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(where)
    if capability < (8, 0):
        return f"the GPU must be of compute capability 8.0 or later, got {capability[0]}.{capability[1]}"
    if find_library(architectures_for(capability)) is None and (reason := nvcc.why_not_buildable()):
        return f"the CUDA extension is not built and cannot be built here: {reason}"
    return None


@torch.compiler.assume_constant_result
def kernel_problem(device: str, dtype: torch.dtype, headdim: int) -> str | None:
    """As why_unavailable, and the extension is loaded afterwards when the answer is None, which is remembered."""
    if (device, dtype, headdim) in _served:
        return None
    problem = why_unavailable(device, dtype, headdim)
    if problem is None:
        load(_cuda_index(torch.device(device)))
        _served.add((device, dtype, headdim))
    return problem


_served: set[tuple[str, torch.dtype, int]] = set()
