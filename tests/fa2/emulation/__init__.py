"""The CUDA kernels on the CPU: their sources run in an emulator of what they use of the GPU.

`build("sm90", "fwd", 64, torch.bfloat16)` compiles one kernel with g++ and returns a callable. An error of the
kernel (a deadlock, a misused barrier, a missing fence) raises `EmulationError`; a race shows as a wrong result for
some seed or policy. Read next: translate.py, machine/machine.h.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fa2.bench.correctness import Problem, cu_seqlens

from .translate import translate_tree

ROOT = Path(__file__).resolve().parents[3]
MACHINE = Path(__file__).resolve().parent / "machine"
POLICIES = {"random": 0, "early": 1, "late": 2}
FLAGS = ["-std=c++17", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fPIC", "-w", "-fno-threadsafe-statics"]
# A wgmma may outlive the scope of the registers that it was given: no two variables share a place on the stack.
FLAGS += ["-fstack-reuse=none"]
# Several libraries in one process, each with its own statics.
FLAGS += ["-fno-gnu-unique"]

Edits = Mapping[str, Sequence[tuple[str, str]]]

# The launches ask for the number of multiprocessors once; here it changes from call to call.
ASKED_ONCE = """if (device < kMaxDevices && (*count = known[device].load(std::memory_order_relaxed)) != 0)
    return cudaSuccess;"""
ASKED_EACH_TIME: Edits = {"kernel_launch.cuh": [(ASKED_ONCE, "")]}


class EmulationError(RuntimeError):
    """The kernel did what a GPU does not allow, or cannot go on."""


def cuda_include() -> Path | None:
    """CUDA's headers: those of the nvcc that builds fa2."""
    from fa2.nvcc import find_nvcc

    nvcc = find_nvcc()
    candidates = [nvcc.resolve().parent.parent] if nvcc else []
    candidates += [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    candidates += [Path(p) / "nvidia" / "cu13" for p in sys.path if p]
    return next((c / "include" for c in candidates if (c / "include" / "cuda_bf16.h").exists()), None)


def why_not() -> str | None:
    """What is missing for building, or None."""
    if shutil.which("g++") is None:
        return "the emulator needs g++"
    if cuda_include() is None:
        return "the emulator needs CUDA's headers (cuda_bf16.h), which come with nvcc"
    return None


def _cache() -> Path:
    path = Path(os.environ.get("FA2_EMULATION_CACHE", Path(tempfile.gettempdir()) / f"fa2-emulation-{os.getuid()}"))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise RuntimeError("\n".join([" ".join(command), *errors[:20]]))


def _digest(files: Sequence[Path], *more: object) -> str:
    digest = hashlib.sha256(repr(more).encode())
    for path in files:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _architecture() -> list[str]:
    # The emulated products are most of the time.
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ["-mavx2", "-mfma"] if " avx2" in flags and " fma" in flags else []


def _machine() -> Path:
    """The emulator itself, compiled once."""
    files = sorted(MACHINE.iterdir())
    sources = [p for p in files if p.suffix == ".cpp" and p.name != "entry.cpp"]
    target = _cache() / f"machine-{_digest(files, FLAGS, _architecture(), str(cuda_include()))}.o"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            parts = []
            for source in sources:
                parts.append(f"{folder}/{source.stem}.o")
                flags = [*FLAGS, *_architecture(), "-O3", f"-I{MACHINE}", f"-isystem{cuda_include()}"]
                _compile(["g++", *flags, "-c", str(source), "-o", parts[-1]])
            _compile(["ld", "-r", *parts, "-o", f"{folder}/all.o"])
            os.replace(f"{folder}/all.o", target)
    return target


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3))


class _Call(ctypes.Structure):
    """entry.cpp's Call."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("batch", "nheads_q", "nheads_kv", "headdim")),
        *((n, ctypes.c_int32) for n in ("seqlen_q", "seqlen_k", "total_q", "total_k")),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("softmax_scale", ctypes.c_double),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("lse_batch", ctypes.c_int64),
        ("lse_head", ctypes.c_int64),
        ("tiles", ctypes.c_void_p),
        *((n, _Tensor) for n in ("q", "k", "v", "out")),
        ("softmax_lse", ctypes.c_void_p),
        *((n, _Tensor) for n in ("dout", "dq", "dk", "dv")),
        *((n, ctypes.c_void_p) for n in ("lse_log2", "delta", "dq_accum", "dq_semaphore", "conversions")),
    )


def _poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Bytes of ones: NaN in every float type, -1 in the integers."""
    x = torch.empty(tuple(shape), dtype=dtype)
    x.view(torch.uint8).fill_(255) if x.numel() else None
    return x


class Kernel:
    """One instantiation, forward or backward.

    forward: `out, lse = kernel(q, k, v, ...)`; backward: `dq, dk, dv = kernel(dout, q, k, v, out, lse, ...)`.
    """

    def __init__(self, library: Path, direction: str, headdim: int, dtype: torch.dtype) -> None:
        self.direction, self.headdim, self.dtype = direction, headdim, dtype
        self._library = ctypes.CDLL(str(library))
        self._library.emulation_error.restype = ctypes.c_char_p
        self._library.emulation_tile_list_size.restype = ctypes.c_int64
        self._library.emulation_semaphores.restype = ctypes.c_int64
        self._library.emulation_conversions.restype = ctypes.c_int64
        self._library.emulation_start.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
        self._library.emulation_allow.argtypes = [ctypes.c_void_p, ctypes.c_uint64]

    def __call__(
        self,
        *tensors: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
        seed: int = 0,
        policy: str = "random",
        multiprocessors: int = 4,
    ) -> tuple[Tensor, ...]:
        """Run the kernel on CPU tensors: dense (b, s, h, d), or varlen (T, h, d) with both cu_seqlens (int32).

        Raises: EmulationError, see the module.
        """
        backward = self.direction == "bwd"
        if backward:
            dout, q, k, v, out, lse = tensors
        else:
            q, k, v = tensors
            out = _poisoned(q.shape, q.dtype)
        varlen = cu_seqlens_q is not None
        rows, rows_k, heads, headdim = q.shape[-3], k.shape[-3], q.shape[-2], q.shape[-1]
        batch = len(cu_seqlens_q) - 1 if varlen else q.shape[0]
        tokens = q.numel() // (heads * headdim)
        lse_shape = (heads, rows) if varlen else (batch, heads, rows)
        if not backward:
            lse = _poisoned(lse_shape, torch.float32)
        self._library.emulation_start(seed, POLICIES[policy], multiprocessors)
        kept: list[Tensor] = []

        def address(x: Tensor | None) -> int | None:
            if x is None:
                return None
            kept.append(x)
            extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
            self._library.emulation_allow(x.data_ptr(), extent * x.element_size())
            return x.data_ptr()

        def tensor(x: Tensor) -> _Tensor:
            strides = (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
            return _Tensor(address(x), (ctypes.c_int64 * 3)(*strides))

        tile_numbers = (
            self._library.emulation_tile_list_size(ctypes.c_int64(rows_k if backward else rows), ctypes.c_int64(batch))
            if varlen
            else 4
        )
        left, right = (window[0], 0) if causal else window
        call = _Call(
            batch=batch, nheads_q=heads, nheads_kv=k.shape[-2], headdim=headdim,
            seqlen_q=0 if varlen else rows, seqlen_k=0 if varlen else rows_k,
            total_q=rows if varlen else 0, total_k=rows_k if varlen else 0,
            cu_seqlens_q=address(cu_seqlens_q), cu_seqlens_k=address(cu_seqlens_k),
            softmax_scale=softmax_scale or headdim**-0.5, window_left=left, window_right=right,
            lse_batch=0 if varlen else rows * heads, lse_head=rows,
            tiles=address(_poisoned((tile_numbers,), torch.int32)),
            q=tensor(q), k=tensor(k), v=tensor(v), out=tensor(out), softmax_lse=address(lse),
        )  # fmt: skip
        results: tuple[Tensor, ...] = (out, lse)
        if backward:
            results = tuple(_poisoned(x.shape, x.dtype) for x in (q, k, v))
            call.dout = tensor(dout)
            call.dq, call.dk, call.dv = map(tensor, results)
            call.lse_log2, call.delta = (address(_poisoned(lse_shape, torch.float32)) for _ in range(2))
            call.dq_accum = address(_poisoned((*lse_shape, self.headdim), torch.float32))
            numbers = self._library.emulation_conversions(*map(ctypes.c_int64, (tokens, batch, heads, k.shape[-2])))
            call.conversions = address(_poisoned((numbers,), torch.int32))
            if deterministic:
                numbers = self._library.emulation_semaphores(*map(ctypes.c_int64, (tokens, batch, heads)))
                call.dq_semaphore = address(_poisoned((numbers,), torch.int32))
        if self._library.emulation_run(ctypes.byref(call)) != 0:
            raise EmulationError(self._library.emulation_error().decode() or "a launch failed")
        return results


def build(
    family: str,
    direction: str,
    headdim: int,
    dtype: torch.dtype,
    grant_kb: int = 163,
    root: str | Path = ROOT,
    edits: Edits | None = None,
    flags: Sequence[str] = (),
) -> Kernel:
    """Compile `family`'s ("sm80", "sm90") kernel ("fwd", "bwd") for a native headdim; what is compiled is kept.

    Args:
        grant_kb: sm80 only, which tiles (sm80/config.h).
        root: the checkout whose fa2/csrc is taken.
        edits: by file under fa2/csrc, texts and what they are replaced by: faults to be found.
        flags: more of g++'s, such as "-g".
    """
    source = Path(root) / "fa2" / "csrc"
    sources = sorted(p for p in source.rglob("*") if p.suffix in {".h", ".cuh"})
    options = SimpleNamespace(
        FA2_FAMILY=family,
        FA2_LAUNCH_HEADER=f'"{family}/launch_{direction}.cuh"',
        FA2_DTYPE={torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}[dtype],
        FA2_HEADDIM=headdim,
        FA2_GRANT=f",{grant_kb}" if family == "sm80" else "",
        FA2_EMULATED_ARCH=int(family[2:]) * 10,
    )
    if direction == "bwd":
        options.FA2_BWD = 1
    machine = _machine()
    edits_of = {name: list(pairs) for name, pairs in {**ASKED_EACH_TIME, **(edits or {})}.items()}
    here = [Path(__file__), Path(__file__).with_name("translate.py")]
    name = _digest([*sources, *here], vars(options), machine.name, edits_of, list(flags), FLAGS)
    library = _cache() / f"{family}_{direction}_{headdim}_{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            translate_tree(source, Path(folder) / "csrc", edits_of)
            defines = [f"-D{key}={value}" for key, value in vars(options).items()]
            flags = [*FLAGS, *flags, *defines, f"-I{folder}/csrc", f"-I{MACHINE}", f"-isystem{cuda_include()}"]
            target = f"{folder}/library.so"
            link = ["-shared", "-Wl,-Bsymbolic", str(machine), "-o", target]
            _compile(["g++", *flags, "-include", "prelude.h", str(MACHINE / "entry.cpp"), *link])
            os.replace(target, library)
    return Kernel(library, direction, headdim, dtype)


def run(p: Problem, forward: Kernel, backward: Kernel | None = None, **options: Any) -> tuple[Tensor, ...]:
    """out, lse (and dq, dk, dv) of a problem of fa2.bench.correctness; `options` as of a kernel's call."""
    options |= {"causal": p.causal, "softmax_scale": p.scale}
    longest = p.k.shape[1]
    if p.q_lengths is not None and p.k_lengths is not None:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (cu_seqlens(n, "cpu") for n in (p.q_lengths, p.k_lengths))
        longest = max(p.k_lengths, default=0)
    # As the public functions: a bound of the longest sequence's keys or more is none.
    options["window"] = tuple(-1 if bound >= longest else bound for bound in p.window)
    deterministic = options.pop("deterministic", False)
    out, lse = forward(p.q, p.k, p.v, **options)
    if backward is None:
        return out, lse
    return out, lse, *backward(p.dout, p.q, p.k, p.v, out, lse, deterministic=deterministic, **options)
