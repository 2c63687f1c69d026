"""The build: tools found or named as missing, units and flags planned, ptxas read, the cache and its lock; and, where
nvcc is there, the real library, built and loaded beside a CPU build of torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fa2 import build, extension, nvcc

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A csrc folder with two sm80 units, one sm90 unit and two host files."""
    csrc = tmp_path / "csrc"
    for name in ("sm80/inst/a.cu", "sm80/inst/b.cu", "sm90/inst/a.cu", "dispatch.cpp", "sm80/config.h"):
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(f"// {name}\n")
    (csrc / "api.cpp").write_text("#include <torch/csrc/stable/library.h>\n")
    (csrc / "spills.txt").write_text("# part | architecture | reason\n")
    return csrc


# --- plan


def gencodes(unit: nvcc.Unit) -> list[str]:
    return [f for f in unit.flags if f.startswith("-gencode")]


def test_each_family_is_compiled_for_its_own_architectures(sources):
    units = {u.object: u for u in nvcc.plan(sources, nvcc.ALL, Path("/torch"))}
    assert set(units) == {"sm80_a.o", "sm80_b.o", "sm90_a.o", "api.o", "dispatch.o"}
    assert gencodes(units["sm80_a.o"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert gencodes(units["sm90_a.o"]) == ["-gencode=arch=compute_90a,code=sm_90a"]
    for host in ("api.o", "dispatch.o"):
        assert {"-DFA2_SM80", "-DFA2_SM90"} <= set(units[host].flags)
        assert not gencodes(units[host])


def test_only_files_that_name_torch_see_its_headers(sources):
    units = {u.object: u for u in nvcc.plan(sources, nvcc.ALL, Path("/torch"))}
    assert "/torch/include" in units["api.o"].flags
    assert "-DTORCH_TARGET_VERSION=0x020b000000000000ULL" in units["api.o"].flags
    for name in ("dispatch.o", "sm80_a.o", "sm90_a.o"):
        assert not any("torch" in f.lower() for f in units[name].flags), name


def test_a_family_that_is_left_out_is_not_in_the_table(sources):
    units = {u.object: u for u in nvcc.plan(sources, ("sm_80",), Path("/torch"))}
    assert set(units) == {"sm80_a.o", "sm80_b.o", "api.o", "dispatch.o"}
    assert "-DFA2_SM90" not in units["api.o"].flags
    only_hopper = {u.object for u in nvcc.plan(sources, ("sm_90a",), Path("/torch"))}
    assert only_hopper == {"sm90_a.o", "api.o", "dispatch.o"}


def test_architectures_are_checked_and_ordered():
    assert nvcc.check_architectures(["sm_90a", "sm_80", "sm_80"]) == ("sm_80", "sm_90a")
    with pytest.raises(nvcc.BuildError, match=r"arch must be one or more of sm_80, sm_90, .*, got sm_70"):
        nvcc.check_architectures(["sm_80", "sm_70"])
    with pytest.raises(nvcc.BuildError, match="got none"):
        nvcc.check_architectures([])


def test_ninja_file_names_every_unit_and_links_without_libcuda(sources):
    tools = nvcc.Toolchain(Path("/cuda/bin/nvcc"), (13, 0), Path("/ninja"), Path("/a torch"))
    text = nvcc.ninja_file(tools, nvcc.plan(sources, nvcc.ALL, tools.torch), nvcc.ALL)
    assert text.count(": compile ") == 5
    link = next(line for line in text.splitlines() if "-shared" in line)
    assert "-cudart=static" in link
    assert "-Xlinker=--no-as-needed -ltorch -ltorch_cpu" in link
    assert "-L'/a torch/lib'" in link
    assert "-lcuda" not in link
    assert "'/a torch/include'" in text


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [((8, 0), ("sm_80",)), ((8, 9), ("sm_80",)), ((9, 0), ("sm_90", "sm_90a")), ((12, 0), ("compute_80",))],
)
def test_first_use_compiles_for_the_gpu_at_hand(capability, wanted):
    assert extension.architectures_for(capability) == wanted
    assert nvcc.check_architectures(wanted) == wanted


def test_source_key_follows_sources_and_flags(sources, monkeypatch):
    before = nvcc.source_key(sources)
    assert nvcc.source_key(sources) == before
    (sources / "README.md").write_text("words do not matter")
    assert nvcc.source_key(sources) == before
    (sources / "sm80/config.h").write_text("// other\n")
    changed = nvcc.source_key(sources)
    assert changed != before
    monkeypatch.setattr(nvcc, "DEVICE_FLAGS", (*nvcc.DEVICE_FLAGS, "-G"))
    assert nvcc.source_key(sources) != changed


# --- tools


def fake_nvcc(folder: Path, release: str) -> Path:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    tool = folder / "bin" / "nvcc"
    tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    tool.chmod(0o755)
    return tool


def fake_torch(folder: Path, version: str) -> Path:
    header = folder / "torch/include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    (folder / "torch/version.py").write_text(f"__version__ = '{version}+cpu'\n")
    return folder / "torch"


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with no tools at all; tests add them."""
    for name in ("CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    packages = tmp_path / "lib/python3/site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(nvcc, "_site_packages", lambda: [packages])
    monkeypatch.setattr(nvcc.shutil, "which", lambda name: None)
    monkeypatch.setattr(nvcc, "find_ninja", lambda: Path("/ninja"))
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    real = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: not str(self).startswith("/usr/local") and real(self))
    return tmp_path


def test_nvcc_is_found_in_the_environment_variable_then_in_nvidias_package(bare, monkeypatch):
    assert nvcc.find_nvcc() is None
    packaged = fake_nvcc(bare / "lib/python3/site-packages/nvidia/cu13", "13.0")
    assert nvcc.find_nvcc() == packaged
    chosen = fake_nvcc(bare / "chosen", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(bare / "chosen"))
    assert nvcc.find_nvcc() == chosen
    assert nvcc.cuda_version(chosen) == (12, 8)


def test_what_is_missing_is_named(bare, monkeypatch):
    with pytest.raises(nvcc.BuildError, match="nvcc was not found: install a CUDA toolkit"):
        nvcc.toolchain()
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    fake_nvcc(bare / "cuda", "12.3")
    with pytest.raises(nvcc.BuildError, match=r"nvcc must be of CUDA 12\.4 or later, got 12\.3"):
        nvcc.toolchain()
    fake_nvcc(bare / "cuda", "12.4")
    with pytest.raises(nvcc.BuildError, match="torch's headers were not found"):
        nvcc.toolchain()
    torch = fake_torch(bare / "lib/python3/site-packages", "2.10.1")
    with pytest.raises(nvcc.BuildError, match=r"torch must be 2\.11 or later, got 2\.10"):
        nvcc.toolchain()
    (torch / "version.py").write_text("__version__ = '2.11.0'\n")
    assert nvcc.toolchain().torch == torch
    assert nvcc.why_not_buildable() is None
    monkeypatch.setattr(nvcc, "find_ninja", lambda: None)
    assert nvcc.why_not_buildable() == "ninja was not found: pip install ninja"


# --- ptxas

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zfast' for 'sm_80'
ptxas info    : Function properties for _Zfast
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 0 barriers, 448 bytes cmem[0]
ptxas info    : Compiling entry function '_Zslow' for 'sm_90a'
ptxas info    : Function properties for _Zslow
    64 bytes stack frame, 40 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 49152 bytes smem
"""


def test_ptxas_is_read():
    assert nvcc.parse_ptxas(PTXAS) == [
        nvcc.KernelUsage("_Zfast", "sm_80", 22, 0, 0),
        nvcc.KernelUsage("_Zslow", "sm_90a", 255, 49152, 64),
    ]


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7511", "C7517", "C7519"])
def test_warnings_of_slow_kernels_are_fatal(code):
    line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert nvcc.fatal_warnings(f"{PTXAS}{line}\n") == [line]
    assert nvcc.fatal_warnings(PTXAS) == []


def test_spills_are_accepted_when_listed_with_a_reason(sources):
    usages = nvcc.parse_ptxas(PTXAS)
    assert build.unlisted_spills(usages, build.listed_spills(sources)) == usages[1:]
    (sources / "spills.txt").write_text("slow | sm_80 | another architecture\n")
    assert build.unlisted_spills(usages, build.listed_spills(sources)) == usages[1:]
    (sources / "spills.txt").write_text("slow | sm_90a | 64 bytes outside the loop\n")
    assert build.unlisted_spills(usages, build.listed_spills(sources)) == []
    (sources / "spills.txt").write_text("slow | sm_90a |\n")
    with pytest.raises(nvcc.BuildError, match=r"spills\.txt:1 must be: kernel-name-part | architecture | reason"):
        build.listed_spills(sources)


@pytest.mark.parametrize(
    ("log", "warnings", "code", "said"),
    [
        (PTXAS.split("ptxas info    : Compiling entry function '_Zslow'")[0], [], 0, ""),
        (PTXAS, [], 1, "spills 64 bytes on sm_90a and is not in spills.txt"),
        ("", ["(C7510) serialized"], 1, "ptxas: (C7510) serialized"),
    ],
)
def test_command_line_fails_on_slow_kernels(monkeypatch, capsys, tmp_path, log, warnings, code, said):
    built = nvcc.Built(tmp_path / nvcc.LIBRARY, 1.0, nvcc.parse_ptxas(log), warnings)
    monkeypatch.setattr(build, "compile_extension", lambda *args: built)
    assert build.main(["--out", str(tmp_path), "--json", str(tmp_path / "usage.json")]) == code
    assert said in capsys.readouterr().err
    assert len(json.loads((tmp_path / "usage.json").read_text())["kernels"]) == len(built.usages)


def test_command_line_says_in_one_line_why_it_cannot_build(monkeypatch, capsys, tmp_path):
    assert build.main(["--arch", "sm_70"]) == 2
    assert "fa2: arch must be one or more of" in capsys.readouterr().err

    def missing() -> nvcc.Toolchain:
        raise nvcc.BuildError("nvcc was not found")

    monkeypatch.setattr(nvcc, "toolchain", missing)
    assert build.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "fa2: nvcc was not found\n"


# --- the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FA2_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pretend_to_compile(out: Path, architectures, calls: list, fail: bool = False):
    calls.append(tuple(architectures))
    time.sleep(0.3)
    if fail:
        raise nvcc.BuildError("nvcc failed: no")
    (out / nvcc.LIBRARY).write_bytes(b"")
    manifest = {"source_key": nvcc.source_key(), "architectures": list(architectures)}
    (out / nvcc.MANIFEST).write_text(json.dumps(manifest))
    return nvcc.Built(out / nvcc.LIBRARY, 0.3, [], [])


@pytest.mark.parametrize("fail", [False, True])
def test_one_builds_and_the_others_wait(cache, monkeypatch, capsys, fail):
    calls: list = []
    monkeypatch.setattr(nvcc, "compile_extension", lambda out, arch: pretend_to_compile(out, arch, calls, fail))
    results: list = []

    def rank() -> None:
        try:
            results.append(extension.build_into_cache(("sm_80",)))
        except nvcc.BuildError as error:
            results.append(str(error))

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for r in ranks:
        r.start()
    for r in ranks:
        r.join()
    assert calls == [("sm_80",)], "one rank compiles"
    assert len(results) == 4
    said = capsys.readouterr().err
    assert said.count("fa2: building the CUDA extension for sm_80, once: ") == 1
    if fail:
        assert set(results) == {"nvcc failed: no"}
        with pytest.raises(nvcc.BuildError):  # a later attempt, perhaps on a mended machine, tries again
            extension.build_into_cache(("sm_80",))
        assert len(calls) == 2
    else:
        assert set(results) == {nvcc.cached_library(("sm_80",))}
        assert results[0].is_relative_to(cache)
        assert said.count("fa2: built in ") == 1
        extension.build_into_cache(("sm_80",))
        assert len(calls) == 1


def test_libraries_of_other_sources_or_architectures_are_passed_over(cache):
    library = nvcc.cached_library(("sm_80",))
    library.parent.mkdir(parents=True)
    assert not extension._matches(library, ("sm_80",))
    pretend_to_compile(library.parent, ("sm_80",), [])
    assert extension._matches(library, ("sm_80",))
    assert not extension._matches(library, ("sm_90",))
    library.with_name(nvcc.MANIFEST).write_text(json.dumps({"source_key": "old", "architectures": ["sm_80"]}))
    assert not extension._matches(library, ("sm_80",))


# --- the real thing

needs_nvcc = pytest.mark.skipif(nvcc.why_not_buildable() is not None, reason=str(nvcc.why_not_buildable()))


def one_kernel_alone(csrc: Path) -> Path:
    """The real sources with one forward a dtype: seconds, where the whole takes minutes."""
    shutil.copytree(nvcc.CSRC, csrc)
    for unit in csrc.glob("sm*/inst/*.cu"):
        if not unit.stem.startswith("fwd_64_"):
            unit.unlink()
    table = (csrc / "dispatch.cpp").read_text()
    one_row = r"kernels.push_back(fwd_row<DType::\1, 64, 99>());"
    table, cut = re.subn(r"\bappend_attention<DType::(k\w+), [\d, ]+>\(kernels\);", one_row, table)
    assert cut == 2, "this test edits dispatch.cpp's table"
    (csrc / "dispatch.cpp").write_text(table)
    return csrc


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> nvcc.Built:
    folder = tmp_path_factory.mktemp("small")
    return nvcc.compile_extension(folder / "out", ("sm_80",), csrc=one_kernel_alone(folder / "csrc"))


def check_library(built: nvcc.Built, architectures: tuple[str, ...], csrc: Path) -> None:
    assert build.report(built, say=lambda line: None) == []
    manifest = json.loads(built.library.with_name(nvcc.MANIFEST).read_text())
    assert manifest["architectures"] == list(architectures)
    assert manifest["source_key"] == nvcc.source_key(csrc)
    image = built.library.read_bytes()
    needed = subprocess.run(["readelf", "-d", built.library], capture_output=True, text=True, check=True).stdout
    assert "[libtorch_cpu.so]" in needed
    assert "libcuda" not in needed, "neither the driver's library nor a shared runtime"
    assert str(ROOT).encode() not in image, "error messages must not carry this machine's paths"


LOADED = """
import ctypes, json, sys
from pathlib import Path
import torch
from torch._subclasses import FakeTensorMode
import fa2
from fa2 import extension

library = extension.load_library(Path(sys.argv[1]))
table = extension.table(library)
assert {row.op for row in table} == set(sys.argv[2:]), table
assert {row.dtype for row in table} == {"float16", "bfloat16"}, table
for name in ("fwd", "fwd_varlen", "bwd", "bwd_varlen", "bwd_qkvpacked", "bwd_varlen_qkvpacked"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("fa2::" + name, "CUDA"), name
mask = (0.125, -1, -1)
with FakeTensorMode():
    x = torch.empty(10, 3, 64, device="cuda", dtype=torch.bfloat16)
    cu = torch.empty(2, dtype=torch.int32, device="cuda")
    assert torch.ops.fa2.fwd_varlen(x, x, x, cu, cu, 10, 10, *mask)[1].shape == (3, 10)
x = torch.ones(2, 5, 3, 16)
torch.testing.assert_close(torch.ops.fa2.fwd(x, x, x, *mask)[0], x)
text = ctypes.create_string_buffer(400)
assert library.fa2_problem_on(0, text, len(text)) == len(text.value)
print(text.value.decode())
"""


def load(built: nvcc.Built, *ops: str, **environment: str) -> str:
    """What the library says about the first GPU, in a process of its own."""
    command = [sys.executable, "-c", LOADED, str(built.library), *ops]
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=everything, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_nvcc
def test_a_library_builds_and_loads_without_a_gpu(small):
    check_library(small, ("sm_80",), small.library.parents[1] / "csrc")
    said = load(small, "fwd", CUDA_VISIBLE_DEVICES="")
    assert "driver" in said or "CUDA error" in said


@pytest.mark.gpu
@needs_nvcc
def test_a_library_without_code_for_this_gpu_says_so(small):
    import torch

    if torch.cuda.get_device_capability()[0] == 8:
        pytest.skip("sm_80 code runs here")
    assert re.search(r"the extension holds no code for this GPU \(sm_\d+\); rebuild it", load(small, "fwd"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_nvcc
def test_every_kernel_is_there_for_every_architecture_and_none_is_slow(tmp_path):
    built = nvcc.compile_extension(tmp_path)
    assert {u.architecture for u in built.usages} >= {"sm_80", "sm_90"}
    by_architecture = [{u.kernel for u in built.usages if u.architecture == a} for a in ("sm_80", "sm_90")]
    assert by_architecture[0] == by_architecture[1]
    check_library(built, nvcc.ALL, nvcc.CSRC)
    load(built, *extension.CUDA_OPS, CUDA_VISIBLE_DEVICES="")


@needs_nvcc
def test_a_compile_error_carries_the_compilers_words(sources, tmp_path):
    for unit in ("sm80/inst/b.cu", "sm90/inst/a.cu", "dispatch.cpp", "api.cpp"):
        (sources / unit).unlink()
    (sources / "sm80/inst/a.cu").write_text("__global__ void kernel() { no_such_thing(); }\n")
    with pytest.raises(nvcc.BuildError, match="no_such_thing"):
        nvcc.compile_extension(tmp_path / "out", ("sm_80",), csrc=sources)
    assert not (tmp_path / "out" / nvcc.LIBRARY).exists()


SASS = """
\t\tFunction : sm90_attention
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
\t\tFunction : second
        /*0000*/                   MOV R1, c[0x0][0x28] ; // no HGMMAX here
"""


def test_instructions_are_counted():
    assert nvcc.count_instruction(SASS, "HGMMA") == {"sm90_attention": 2, "second": 0}


def test_a_hopper_kernel_without_wgmma_is_a_problem(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(build, "disassemble", lambda library, architecture: SASS)
    assert build.without_wgmma(Path("x"), said.append) == []
    monkeypatch.setattr(build, "disassemble", lambda library, architecture: SASS.replace("HGMMA.64", "HMMA.64"))
    assert build.without_wgmma(Path("x"), said.append) == ["sm90_attention has no HGMMA on sm_90a"]
    assert said == [f"HGMMA in {n} of 1 sm_90a attention kernels" for n in (1, 0)]


def test_a_missing_disassembler_is_said(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(nvcc, "find_cuobjdump", lambda: None)
    assert build.without_wgmma(Path("x"), said.append) == []
    assert "cuobjdump was not found: pip install" in said[0]
