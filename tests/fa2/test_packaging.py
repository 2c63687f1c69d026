"""What `pip` makes of the repository: a wheel that holds fa2 alone, for any platform without the library and for this
one with it; an editable install that compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
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


@pytest.mark.slow
@pytest.mark.skipif(nvcc.why_not_buildable() is not None, reason=str(nvcc.why_not_buildable()))
def test_with_the_library(tmp_path):
    name, files, said = build("build_wheel", tmp_path)
    assert "-py3-none-linux_" in name
    assert {"fa2/fa2_cuda.so", "fa2/fa2_cuda.json"} <= files
    assert "fa2: compiling the CUDA extension for sm_80, sm_90, compute_80, sm_90a" in said
