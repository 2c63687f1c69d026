"""Builds the `fa2` wheel. With nvcc and the target environment's torch headers at hand it compiles the CUDA extension
into the wheel; without them it packs the Python part, says so, and the first call on a GPU builds. Torch is no build
requirement: pip builds in isolation, and would fetch gigabytes only to compile against their headers. An editable
install never compiles. FA2_SKIP_BUILD=1 leaves the extension out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def _nvcc() -> ModuleType:
    """fa2/nvcc.py by its path: `import fa2` would import torch, which an isolated build does not have."""
    spec = importlib.util.spec_from_file_location("fa2_nvcc", ROOT / "fa2" / "nvcc.py")
    assert spec, "fa2/nvcc.py must lie beside setup.py"
    assert spec.loader, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


nvcc = _nvcc()


def _why_python_only() -> str | None:
    if os.environ.get("FA2_SKIP_BUILD", "0") not in ("", "0"):
        return "FA2_SKIP_BUILD is set"
    return nvcc.why_not_buildable()


def _say(text: str) -> None:
    print(f"fa2: {text}", file=sys.stderr, flush=True)


class WithLibrary(Distribution):
    """Tells setuptools, which compiles nothing itself, that the wheel holds machine code."""

    def has_ext_modules(self) -> bool:
        return _why_python_only() is None


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if reason := _why_python_only():
            _say(f"installing the Python part only: {reason}")
            return
        _say(f"compiling the CUDA extension for {', '.join(nvcc.ALL)}")
        built = nvcc.compile_extension(Path(self.build_lib) / "fa2")
        _say(f"compiled in {built.seconds:.0f} s")


class BdistWheel(bdist_wheel):
    """The library uses the stable ABI, so a wheel with it fits every Python 3 of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", "any" if self.root_is_pure else platform


setup(
    packages=["fa2", "fa2.bench", "fa2.integrations"],
    package_data={"fa2": ["README.md", "csrc/**/*"]},
    # Fetched for the build alone, and only where it will compile.
    setup_requires=["ninja>=1.11"] if nvcc.find_nvcc() and not nvcc.find_ninja() else [],
    distclass=WithLibrary,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
)
