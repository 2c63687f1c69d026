"""Compiles the CUDA extension: nvcc through ninja, one library for every Python and every torch >= 2.11.

`compile_extension` is the one function; `setup.py`, `python -m fa2.build` and the first call on a GPU (`extension.py`)
use it. Imports neither torch nor the rest of fa2, because `setup.py` runs it where torch is not importable.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "fa2_cuda.so"
MANIFEST = "fa2_cuda.json"  # beside the library: what it was built from
CSRC = Path(__file__).resolve().parent / "csrc"
MIN_CUDA = (12, 4)
MIN_TORCH = (2, 11)
# The extra `nvcc`: the compiler, its headers and the static CUDA runtime, all named so that pip takes one version.
NVCC_PACKAGES = "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]>=13,<14"

# Architecture -> the folder whose units are compiled for it, and nvcc's flag. sm_90a code runs on Hopper alone, and
# nvcc's -arch=sm_90a shorthand would also ask for PTX; compute_80 is the PTX that later GPUs compile for themselves.
ARCHITECTURES = {
    "sm_80": ("sm80", "-gencode=arch=compute_80,code=sm_80"),
    "sm_90": ("sm80", "-gencode=arch=compute_90,code=sm_90"),
    "compute_80": ("sm80", "-gencode=arch=compute_80,code=compute_80"),
    "sm_90a": ("sm90", "-gencode=arch=compute_90a,code=sm_90a"),
}
ALL = tuple(ARCHITECTURES)

HOST_FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall")
# -Xptxas -v writes the registers, shared memory and spills that `report` reads.
DEVICE_FLAGS = (*HOST_FLAGS, "--expt-relaxed-constexpr", "-Xptxas=-v")
# Stable ABI: torch 2.11 is the oldest that loads the library.
TORCH_FLAGS = (f"-DTORCH_TARGET_VERSION=0x{MIN_TORCH[0]:02x}{MIN_TORCH[1]:02x}000000000000ULL",)
# Without --no-as-needed the linker drops libtorch_cpu and the weak aoti_torch_get_current_cuda_stream stays null. The
# CUDA runtime is static and libcuda is never named, so the library loads on a machine without a driver.
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu")

# ptxas warnings that mean a slow kernel: setmaxnreg ignored, wgmma serialised (four reasons), waits injected.
FATAL_WARNINGS = ("C7508", "C7510", "C7511", "C7512", "C7514", "C7515", "C7517", "C7519")


class BuildError(RuntimeError):
    """The extension cannot be built here; the message says why and what to do."""


# --- tools


@dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    cuda: tuple[int, int]
    ninja: Path
    torch: Path  # the package's folder: include/ and lib/


def _site_packages() -> list[Path]:
    """Where the target environment keeps its packages.

    In an isolated build they are not importable, so they are looked up: this interpreter's own folders (pip isolates by
    path, not by prefix), then the activated environment's.
    """
    found = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if root := os.environ.get(name):
            found += sorted(Path(root).glob("lib/python3*/site-packages"))
    found += [Path(p) for p in (*site.getsitepackages(), site.getusersitepackages(), *sys.path) if p]
    return list(dict.fromkeys(p for p in found if p.is_dir()))


def find_nvcc() -> Path | None:
    """CUDA_HOME or CUDA_PATH, then PATH, /usr/local/cuda, and NVIDIA's nvcc packages."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if (root := os.environ.get(name)) and (nvcc := Path(root) / "bin" / "nvcc").is_file():
            return nvcc
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    candidates = [Path("/usr/local/cuda/bin/nvcc")]
    for packages in _site_packages():
        candidates += sorted(packages.glob("nvidia/cu[0-9]*/bin/nvcc"), reverse=True)
        candidates.append(packages / "nvidia" / "cuda_nvcc" / "bin" / "nvcc")
    return next((nvcc for nvcc in candidates if nvcc.is_file()), None)


def cuda_version(nvcc: Path) -> tuple[int, int]:
    """The toolkit's version, from nvcc --version."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{nvcc} does not run: {error}") from None
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"{nvcc} --version names no release")
    return int(match[1]), int(match[2])


def find_ninja() -> Path | None:
    """ninja on PATH, beside this interpreter, or in the `ninja` package."""
    if on_path := shutil.which("ninja"):
        return Path(on_path)
    candidates = [Path(sys.executable).parent / "ninja"]
    candidates += [packages / "ninja" / "data" / "bin" / "ninja" for packages in _site_packages()]
    candidates += [packages.parents[2] / "bin" / "ninja" for packages in _site_packages() if len(packages.parents) > 2]
    return next((ninja for ninja in candidates if ninja.is_file()), None)


def find_torch() -> Path | None:
    """The folder of a torch that has the headers, without importing it."""
    loaded = getattr(sys.modules.get("torch"), "__file__", None)
    candidates = [Path(loaded).parent] if loaded else []
    candidates += [packages / "torch" for packages in _site_packages()]
    return next((t for t in candidates if (t / "include/torch/csrc/stable/library.h").is_file()), None)


def torch_version(torch: Path) -> tuple[int, int]:
    match = re.search(r"__version__ = '(\d+)\.(\d+)", (torch / "version.py").read_text())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def toolchain() -> Toolchain:
    """Everything a build needs, or a BuildError that names what is missing."""
    nvcc, ninja, torch = find_nvcc(), find_ninja(), find_torch()
    if nvcc is None:
        raise BuildError(
            "nvcc was not found: install a CUDA toolkit >= 12.4 and set CUDA_HOME, or put nvcc on PATH, or install "
            f"NVIDIA's packages: pip install '{NVCC_PACKAGES}'"
        )
    cuda = cuda_version(nvcc)
    if cuda < MIN_CUDA:
        raise BuildError(f"nvcc must be of CUDA 12.4 or later, got {cuda[0]}.{cuda[1]} ({nvcc})")
    if ninja is None:
        raise BuildError("ninja was not found: pip install ninja")
    if torch is None:
        raise BuildError("torch's headers were not found: install torch >= 2.11 first")
    if torch_version(torch) < MIN_TORCH:
        have = ".".join(map(str, torch_version(torch)))
        raise BuildError(f"torch must be 2.11 or later, got {have} ({torch})")
    return Toolchain(nvcc, cuda, ninja, torch)


def why_not_buildable() -> str | None:
    """A sentence when this machine cannot build the extension, None when it can."""
    try:
        toolchain()
    except BuildError as error:
        return str(error)
    return None


# --- plan


@dataclass(frozen=True)
class Unit:
    source: Path
    object: str  # file name in the build folder
    flags: tuple[str, ...]


def check_architectures(architectures: Iterable[str]) -> tuple[str, ...]:
    """In the table's order, without repetition."""
    wanted = set(architectures)
    if not wanted or wanted - set(ALL):
        raise BuildError(f"arch must be one or more of {', '.join(ALL)}, got {', '.join(sorted(wanted)) or 'none'}")
    return tuple(a for a in ALL if a in wanted)


def plan(csrc: Path, architectures: Sequence[str], torch: Path) -> list[Unit]:
    """The compile units: each family's inst/*.cu for the family's architectures, then the host's *.cpp."""
    units = []
    families = {}
    for family in dict.fromkeys(folder for folder, _ in ARCHITECTURES.values()):
        gencodes = tuple(ARCHITECTURES[a][1] for a in architectures if ARCHITECTURES[a][0] == family)
        sources = sorted((csrc / family / "inst").glob("*.cu"))
        if gencodes and sources:
            families[family] = f"-DFA2_{family.upper()}"
            units += [Unit(s, f"{family}_{s.stem}.o", (*DEVICE_FLAGS, *gencodes)) for s in sources]
    # The table lists the kernels of the families that are in this library.
    host = (*HOST_FLAGS, *families.values(), f"-Xcompiler=-ffile-prefix-map={csrc}=fa2/csrc")
    for source in sorted(csrc.glob("*.cpp")):
        needs_torch = "torch/" in source.read_text()
        flags = (*host, *TORCH_FLAGS, "-isystem", str(torch / "include")) if needs_torch else host
        units.append(Unit(source, f"{source.stem}.o", flags))
    return units


def _escape(value: object) -> str:
    return re.sub(r"([$ :])", r"$\1", str(value))


def ninja_file(tools: Toolchain, units: Sequence[Unit], architectures: Sequence[str]) -> str:
    """The build as ninja's rules.

    Each unit's output goes into a log beside its object, so that registers and spills can be read again when the object
    is up to date.
    """
    quote = "'{}'".format
    # Named again, because the linker's own (empty) device code would be for nvcc's default architecture.
    link = (*LINK_FLAGS, *(ARCHITECTURES[a][1] for a in architectures))
    # nvcc looks into its toolkit's lib64; NVIDIA's packages keep the static CUDA runtime in lib.
    beside = tools.nvcc.resolve().parents[1] / "lib"
    folders = [tools.torch / "lib", *([beside] if (beside / "libcudart_static.a").is_file() else [])]
    lines = [
        "ninja_required_version = 1.5",
        f"nvcc = {str(tools.nvcc).replace('$', '$$')}",
        "rule compile",
        '  command = "$nvcc" $flags -MMD -MF $out.d -c $in -o $out > $out.log 2>&1 || { cat $out.log; exit 1; }',
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f'  command = "$nvcc" $in -o $out {" ".join("-L" + quote(f) for f in folders)} {" ".join(link)}',
        "  description = $out",
    ]
    for unit in units:
        flags = " ".join(quote(f) if " " in f or "(" in f else f for f in unit.flags).replace("$", "$$")
        lines += [f"build {unit.object}: compile {_escape(unit.source)}", f"  flags = {flags}"]
    lines += [f"build {LIBRARY}: link {' '.join(u.object for u in units)}", f"default {LIBRARY}", ""]
    return "\n".join(lines)


def source_key(csrc: Path = CSRC) -> str:
    """A digest of the sources and flags: the same for every library that could stand in for another."""
    digest = hashlib.sha256()
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cpp")):
        digest.update(f"{path.relative_to(csrc).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    digest.update(repr((HOST_FLAGS, DEVICE_FLAGS, TORCH_FLAGS, LINK_FLAGS, ARCHITECTURES)).encode())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """FA2_CACHE_DIR, else fa2 in the user's cache folder."""
    if chosen := os.environ.get("FA2_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fa2"


def cached_library(architectures: Sequence[str]) -> Path:
    """Where a library of these sources, flags and architectures lies, built or not."""
    key = f"{source_key()}-{platform.machine()}-{'-'.join(check_architectures(architectures))}"
    return cache_directory() / key / LIBRARY


# --- what ptxas says


@dataclass(frozen=True)
class KernelUsage:
    kernel: str
    architecture: str
    registers: int
    smem_bytes: int
    spill_bytes: int  # stores + loads


_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


def parse_ptxas(text: str) -> list[KernelUsage]:
    """Registers, static shared memory and spills of each kernel, from `-Xptxas -v`."""
    usages = []
    entry, spills = None, 0
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            entry, spills = (match[1], match[2]), 0
        elif match := _SPILLS.search(line):
            spills = int(match[1]) + int(match[2])
        elif entry and (match := _USED.search(line)):
            smem = _SMEM.search(line)
            usages.append(KernelUsage(*entry, int(match[1]), int(smem[1]) if smem else 0, spills))
            entry = None
    return usages


def fatal_warnings(text: str) -> list[str]:
    """The lines with ptxas warnings that mean a slow kernel."""
    return [line.strip() for line in text.splitlines() if any(f"({w})" in line or w in line for w in FATAL_WARNINGS)]


def find_cuobjdump() -> Path | None:
    """The disassembler: on PATH, beside nvcc, or in NVIDIA's packages (which `.[dev]` brings)."""
    if on_path := shutil.which("cuobjdump"):
        return Path(on_path)
    candidates = [nvcc.resolve().with_name("cuobjdump")] if (nvcc := find_nvcc()) else []
    for packages in _site_packages():
        candidates += sorted(packages.glob("nvidia/cu[0-9]*/bin/cuobjdump"), reverse=True)
    return next((tool for tool in candidates if tool.is_file()), None)


_FUNCTION = re.compile(r"Function : (\S+)")


def count_instruction(sass: str, instruction: str) -> dict[str, int]:
    """How often each function of a disassembly has an instruction."""
    counts: dict[str, int] = {}
    function = ""
    for line in sass.splitlines():
        if match := _FUNCTION.search(line):
            function = match[1]
            counts[function] = 0
        elif function and re.search(rf"\b{instruction}\b", line):
            counts[function] += 1
    return counts


def disassemble(library: Path, architecture: str) -> str:
    """SASS of one architecture. Raises BuildError where there is no cuobjdump, or it fails."""
    tool = find_cuobjdump()
    if tool is None:
        raise BuildError("cuobjdump was not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it calls nvdisasm
    command = [str(tool), "-sass", "-arch", architecture, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
    if done.returncode:
        raise BuildError(f"cuobjdump failed: {done.stderr.strip()}")
    return done.stdout


# --- build


@dataclass(frozen=True)
class Built:
    library: Path
    seconds: float
    usages: list[KernelUsage]
    warnings: list[str]


def compile_extension(
    out: Path,
    architectures: Sequence[str] = ALL,
    jobs: int | None = None,
    work: Path | None = None,
    csrc: Path = CSRC,
) -> Built:
    """Compile and link the extension into the folder `out`, for the given architectures.

    `work` keeps the objects, so that a second build compiles only what changed; without it they are thrown away.
    The library appears in one step, complete. Raises BuildError with the compiler's own words.
    """
    architectures = check_architectures(architectures)
    tools = toolchain()
    started = time.monotonic()
    units = plan(csrc, architectures, tools.torch)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fa2-build-") as scratch:
        folder = work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(tools, units, architectures))
        command = [str(tools.ninja), "-C", str(folder), *([f"-j{jobs}"] if jobs else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise BuildError("nvcc failed:\n" + "\n".join(done.stdout.splitlines()[-40:]))
        log = "\n".join((folder / f"{unit.object}.log").read_text() for unit in units)
        manifest = {
            "source_key": source_key(csrc),
            "architectures": list(architectures),
            "cuda": ".".join(map(str, tools.cuda)),
            "torch": ".".join(map(str, torch_version(tools.torch))),
        }
        _install(folder / LIBRARY, out / LIBRARY)
        (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return Built(out / LIBRARY, time.monotonic() - started, parse_ptxas(log), fatal_warnings(log))


def _install(source: Path, target: Path) -> None:
    """Copy, then rename: a process that looks meanwhile sees the old library, or none, or the whole new one."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    os.replace(partial, target)
