"""The rules of the tree that a machine can hold: who imports whom, where inline assembly and torch's headers live."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fa2", "model", "data", "train")
# conf -> train -> {data, model};  model -> fa2. Never back.
MAY_IMPORT = {
    "fa2": set(),
    "model": {"fa2"},
    "data": set(),
    "train": {"fa2", "model", "data"},
}
THIRD_PARTY = {
    "fa2": {
        "torch",
        "triton",
        "numpy",
        "matplotlib",
        "transformers",
        "flash_attn",
        "flash_attn_interface",
        "setuptools",
    },
    "model": {"torch", "safetensors"},
    "data": {"torch", "numpy", "pyarrow", "datasets", "tokenizers", "tqdm"},
}
LAZY = {"datasets", "wandb", "matplotlib", "tensorboard"}  # not on every machine that trains: imported where used


def python_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_modules(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def top_level_imports(tree: ast.Module) -> set[str]:
    """Modules imported when the file is imported: everything outside functions and `if TYPE_CHECKING`."""
    names: set[str] = set()
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= imported_modules(node)
        stack.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_lies_below_them(room: str) -> None:
    files = python_files(room)
    assert files, f"{room} has no Python files"
    for path in files:
        wrong = (imported_modules(ast.parse(path.read_text())) & set(ROOMS)) - MAY_IMPORT[room] - {room}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("room", sorted(THIRD_PARTY))
def test_rooms_need_only_their_packages(room: str) -> None:
    for path in python_files(room):
        modules = imported_modules(ast.parse(path.read_text()))
        wrong = modules - set(sys.stdlib_module_names) - THIRD_PARTY[room] - set(ROOMS)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_optional_packages_are_imported_where_they_are_used() -> None:
    for room in ROOMS:
        for path in python_files(room):
            wrong = top_level_imports(ast.parse(path.read_text())) & LAZY
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)} at the top"


def test_top_level_is_fixed() -> None:
    folders = {
        p.name
        for p in ROOT.iterdir()
        if p.is_dir() and not p.name.startswith(".") and any(f.suffix in {".py", ".yaml"} for f in p.rglob("*"))
    }
    generated = {"runs", "outputs", "multirun", "build", "dist", "wandb", "lightning_logs"}
    assert folders - generated == {*ROOMS, "conf", "tests"}


def cuda_sources() -> list[Path]:
    return sorted(p for p in (ROOT / "fa2" / "csrc").rglob("*") if p.suffix in {".cpp", ".h", ".cu", ".cuh"})


def test_inline_assembly_lives_in_ptx() -> None:
    sources = cuda_sources()
    assert sources
    for path in sources:
        if path.parent.name != "ptx":
            assert not re.search(r"\basm\b", path.read_text()), f"{path.relative_to(ROOT)} holds inline assembly"


def test_torch_headers_are_included_by_the_binding_alone() -> None:
    for path in cuda_sources():
        if path.name != "api.cpp":
            wrong = re.findall(r"#include\s*[<\"](?:torch|ATen|c10)/", path.read_text())
            assert not wrong, f"{path.relative_to(ROOT)} includes torch's headers"


def test_no_generic_module_names() -> None:
    banned = {"utils.py", "helpers.py", "common.py", "misc.py"}
    found = [p for room in ROOMS for p in python_files(room) if p.name in banned]
    assert not found
