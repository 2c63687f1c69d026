"""What `pip` makes of the repository: a wheel that holds fa2 alone, for any platform without the library and for this
one with it, which runs beside torch alone; an editable install that compiles nothing; the extra that brings nvcc."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest

from fa2 import nvcc

ROOT = Path(__file__).resolve().parents[2]

try:
    SETUPTOOLS = int(version("setuptools").split(".")[0])
except PackageNotFoundError:
    SETUPTOOLS = 0
pytestmark = pytest.mark.skipif(SETUPTOOLS < 77, reason="needs setuptools >= 77, which pip would fetch for the build")


def build(hook: str, tmp_path: Path, **environment: str) -> tuple[str, set[str], str]:
    """Runs a build hook as pip does, in a copy: the wheel's file name, the names in it, and what was said."""
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    shutil.copytree(
        ROOT / "fa2", checkout / "fa2", ignore=shutil.ignore_patterns("__pycache__", "*.so", "fa2_cuda.json")
    )
    for name in ("data", "model", "train", "conf", "tests"):  # rooms that must stay out
        (checkout / name).mkdir()
        (checkout / name / "room.py").write_text("")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    out.mkdir()
    call = f"import sys, setuptools.build_meta as hooks; hooks.{hook}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", call, str(out)],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel.name, set(zipfile.ZipFile(wheel).namelist()), done.stderr


def test_python_only(tmp_path):
    name, files, said = build("build_wheel", tmp_path, FA2_SKIP_BUILD="1")
    assert name.endswith("-py3-none-any.whl")
    assert "fa2: installing the Python part only: FA2_SKIP_BUILD is set" in said
    rooms = {f.split("/")[0] for f in files if ".dist-info" not in f}
    assert rooms == {"fa2"}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "fa2").rglob("*") if p.suffix in {".py", ".cu", ".cuh"}}
    assert sources <= files, "the first use on a GPU compiles from the installed sources"
    assert {"fa2/csrc/spills.txt", "fa2/csrc/api.cpp", "fa2/csrc/params.h"} <= files


def test_an_editable_install_compiles_nothing(tmp_path):
    _, files, said = build("build_editable", tmp_path)
    assert not any(f.endswith(".so") for f in files)
    assert "compiling" not in said
    assert not list((tmp_path / "checkout").rglob("*.so"))


def link_torch_and_what_it_needs(folder: Path) -> None:
    """The packages that `pip install torch` brings, as links to this environment's."""
    wanted, seen = ["torch"], set()
    while wanted:
        name = wanted.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        seen.add(name)
        for top in {f.parts[0] for f in package.files or () if f.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(package.locate_file(top))
        needs = [re.match(r"[\w.-]+", need)[0] for need in package.requires or () if "extra ==" not in need]
        wanted += [need for need in needs if need not in seen]


USE = """
import importlib.util, json, sys
import torch, fa2
from fa2.layers import MultiheadAttention

qkv = torch.randn(9, 3, 2, 16, requires_grad=True)
lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
fa2.flash_attn_varlen_qkvpacked_func(qkv, lengths, 5, causal=True).sum().backward()
MultiheadAttention(32, 2)(torch.randn(1, 5, 32)).sum().backward()
others = ("numpy", "lightning", "hydra", "matplotlib", "model", "data", "train")
print(json.dumps({
    "where": fa2.__file__,
    "gradient": qkv.grad.isfinite().all().item(),
    "others": [name for name in others if importlib.util.find_spec(name)],
    "kernels": len(fa2.kernels()) if "kernels" in sys.argv else None,
}))
"""


def use_in_a_clean_environment(wheel: Path, tmp_path: Path, *arguments: str) -> dict:
    """Installs the wheel with pip beside torch alone, away from the checkout and without a compiler, and uses it."""
    environment, beside = tmp_path / "environment", tmp_path / "beside"
    venv.create(environment, with_pip=False, symlinks=True)
    python = str(environment / "bin" / "python")
    (packages,) = environment.glob("lib/python3*/site-packages")
    beside.mkdir()
    link_torch_and_what_it_needs(beside)
    (packages / "torch_alone.pth").write_text(f"{beside}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CUDA", "FA2"))}
    clean |= {"PYTHONNOUSERSITE": "1", "PIP_CONFIG_FILE": os.devnull}

    def run(*command: str, **more: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env={**clean, **more}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-index", str(wheel))  # resolves: torch is all that it asks for
    assert "\nRequires: torch\n" in run(*pip, "show", "fa2-attention")
    said = json.loads(run(python, "-c", USE, *arguments, PATH="", FA2_CACHE_DIR=str(tmp_path / "cache")))
    assert Path(said["where"]).is_relative_to(packages)
    assert said["gradient"]
    assert said["others"] == []
    return said


def test_the_wheel_runs_beside_torch_alone(tmp_path):
    name, _, _ = build("build_wheel", tmp_path, FA2_SKIP_BUILD="1")
    wheel = tmp_path / "out" / name
    (metadata,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".dist-info/METADATA"))
    headers = message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    assert headers["Name"] == "fa2-attention"
    assert headers["Requires-Python"] == ">=3.10"
    needs = [need for need in headers.get_all("Requires-Dist") if "extra ==" not in need]
    assert needs == ["torch>=2.11"]
    assert any(nvcc.NVCC_PACKAGES.split(">")[0] in need for need in headers.get_all("Requires-Dist"))
    use_in_a_clean_environment(wheel, tmp_path)


PACKAGED = sorted(n for packages in nvcc._site_packages() for n in packages.glob("nvidia/cu[0-9]*/bin/nvcc"))


@pytest.mark.skipif(not PACKAGED, reason="the extra `nvcc` is not installed")
def test_the_nvcc_of_the_extra_compiles_and_links(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(PACKAGED[-1].parents[1]))
    assert nvcc.find_nvcc() == PACKAGED[-1]
    shutil.copytree(nvcc.CSRC, tmp_path / "csrc")
    for unit in tmp_path.glob("csrc/*/inst/*.cu"):
        if unit.name != "fwd_64_bf16.cu":
            unit.unlink()
    built = nvcc.compile_extension(tmp_path / "out", ("sm_80",), csrc=tmp_path / "csrc")
    assert {u.architecture for u in built.usages} == {"sm_80"}
    assert built.warnings == []
    assert built.library.is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every unit: two minutes on two idle cores, five on busy ones
@pytest.mark.skipif(nvcc.why_not_buildable() is not None, reason=str(nvcc.why_not_buildable()))
def test_with_the_library(tmp_path):
    name, files, said = build("build_wheel", tmp_path)
    assert "-py3-none-linux_" in name
    assert {"fa2/fa2_cuda.so", "fa2/fa2_cuda.json"} <= files
    assert "fa2: compiling the CUDA extension for sm_80, sm_90, compute_80, sm_90a" in said
    said = use_in_a_clean_environment(tmp_path / "out" / name, tmp_path, "kernels")
    assert said["kernels"] > 0, "the library of the wheel, for there is no compiler"
    assert not list((tmp_path / "cache").rglob("*.so"))
    # One file for every Python and every torch >= 2.11: it calls torch through its stable C interface alone.
    library = next(tmp_path.glob("environment/lib/python3*/site-packages/fa2/fa2_cuda.so"))
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in symbols.stdout.splitlines()]
    assert any(n.startswith(("aoti_torch", "torch_")) for n in names)
    assert [n for n in names if n.startswith(("Py", "_Py", "_ZN2at", "_ZN3c10", "_ZN5torch", "_ZNK2at", "cu"))] == []
