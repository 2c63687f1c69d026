"""`python -m fa2.build`: compile the CUDA extension, list what each kernel uses, and fail on what makes a kernel slow
(a spill that `csrc/spills.txt` does not explain, a ptxas warning of serialised wgmma, a Hopper kernel without wgmma).
The compiling itself: `nvcc.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from fa2.nvcc import (
    ALL,
    CSRC,
    BuildError,
    Built,
    KernelUsage,
    cached_library,
    check_architectures,
    compile_extension,
    count_instruction,
    disassemble,
)


def listed_spills(csrc: Path = CSRC) -> list[tuple[str, str, str]]:
    """(part of the kernel's name, architecture, reason) of the spills that are known and accepted."""
    rows = []
    for number, line in enumerate((csrc / "spills.txt").read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            fields = [field.strip() for field in line.split("|")]
            if len(fields) != 3 or not all(fields):
                raise BuildError(f"spills.txt:{number} must be: kernel-name-part | architecture | reason")
            rows.append((fields[0], fields[1], fields[2]))
    return rows


def unlisted_spills(usages: Iterable[KernelUsage], listed: Sequence[tuple[str, str, str]]) -> list[KernelUsage]:
    def known(u: KernelUsage) -> bool:
        return any(part in u.kernel and architecture == u.architecture for part, architecture, _ in listed)

    return [u for u in usages if u.spill_bytes and not known(u)]


def demangle(names: Sequence[str]) -> list[str]:
    """Readable names, where c++filt is there."""
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if not tool or not names:
        return list(names)
    out = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=False).stdout
    lines = out.splitlines()
    return lines if len(lines) == len(names) else list(names)


def report(built: Built, say: Callable[[str], None] = print, csrc: Path = CSRC) -> list[str]:
    """Say what each kernel uses; return what must not be: unlisted spills and ptxas's warnings of a slow kernel."""
    names = dict(zip((u.kernel for u in built.usages), demangle([u.kernel for u in built.usages]), strict=True))
    say(f"{'registers':>9} {'smem B':>8} {'spill B':>8}  {'arch':<8} kernel")
    for u in sorted(built.usages, key=lambda u: (u.kernel, u.architecture)):
        say(f"{u.registers:>9} {u.smem_bytes:>8} {u.spill_bytes:>8}  {u.architecture:<8} {names[u.kernel]}")
    problems = [
        f"{names[u.kernel]} spills {u.spill_bytes} bytes on {u.architecture} and is not in spills.txt"
        for u in unlisted_spills(built.usages, listed_spills(csrc))
    ]
    return problems + [f"ptxas: {line}" for line in built.warnings]


def without_wgmma(library: Path, say: Callable[[str], None] = print) -> list[str]:
    """The Hopper attention kernels whose code has no HGMMA, the tensor cores' asynchronous product."""
    try:
        counts = count_instruction(disassemble(library, "sm_90a"), "HGMMA")
    except BuildError as error:
        say(f"the code of sm_90a is not looked at: {error}")
        return []
    kernels = {name: count for name, count in counts.items() if "sm90" in name and "attention" in name}
    say(f"HGMMA in {sum(map(bool, kernels.values()))} of {len(kernels)} sm_90a attention kernels")
    return [f"{name} has no HGMMA on sm_90a" for name, count in kernels.items() if not count]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m fa2.build`. Exit code 0; 1 for what makes a kernel slow; 2 when it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m fa2.build", description="Build fa2's CUDA extension with nvcc.")
    parser.add_argument("--arch", default=",".join(ALL), help="comma-separated, of: %(default)s (all)")
    parser.add_argument("--out", type=Path, help="folder for the library (default: the cache that fa2 looks into)")
    parser.add_argument("--work", type=Path, help="keep objects here, for incremental builds")
    parser.add_argument("--jobs", type=int, help="compilers at once (default: ninja's choice)")
    parser.add_argument("--json", type=Path, help="also write registers, shared memory and spills here")
    args = parser.parse_args(argv)
    try:
        architectures = check_architectures(args.arch.split(","))
        out = args.out or cached_library(architectures).parent
        built = compile_extension(out, architectures, args.jobs, args.work)
        problems = report(built)
    except BuildError as error:
        print(f"fa2: {error}", file=sys.stderr)
        return 2
    print(f"{built.library}: {', '.join(architectures)} in {built.seconds:.1f} s")
    if "sm_90a" in architectures:
        problems += without_wgmma(built.library)
    if args.json:
        rows = {"seconds": round(built.seconds, 1), "kernels": [asdict(u) for u in built.usages]}
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    for problem in problems:
        print(f"fa2: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
