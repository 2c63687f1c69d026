"""Kernel sources for a C++ compiler: the four things that are nvcc's alone are rewritten, nothing else.

* `asm volatile("text" : outputs : inputs : clobbers)` becomes a call of the interpreter with the same text and
  operands (machine/ptx.h), also in the body of a macro;
* `kernel<<<grid, block, shared, stream>>>(arguments)` a call of `launch`;
* `extern __shared__` arrays the running block's memory;
* `#pragma unroll` goes.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_OPERAND = re.compile(r'"([=+]?)&?[a-z]"\s*\(')
_COMMENT = re.compile(r"//[^\n]*")


def _close(text: str, at: int) -> int:
    """The place of the parenthesis that closes the one at `at`."""
    depth = 0
    while True:
        if text[at] == '"':
            at = _STRING.match(text, at).end()
            continue
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
        at += 1


def _sections(body: str) -> list[str]:
    """Text, outputs, inputs and clobbers: cut at the colons outside of strings, parentheses and `::` of names."""
    parts, begin, at, depth = [], 0, 0, 0
    while at < len(body):
        if body[at] == '"':
            at = _STRING.match(body, at).end()
            continue
        depth += body[at] in "([{"
        depth -= body[at] in ")]}"
        if body[at] == ":" and depth == 0:
            parts.append(body[begin:at])
            begin = at + 1
        at += 1
    return [*parts, body[begin:]]


def _assembly(text: str) -> str:
    result, at = [], 0
    for match in re.finditer(r"\basm(?:\s+volatile)?\s*\(", text):
        if match.start() < at:
            continue
        end = _close(text, match.end() - 1)
        template, *operands = _sections(text[match.end() : end].replace("\\\n", " "))
        listed = [part.strip() for part in operands[:2] if part.strip()]
        # An own scope: the same function may hold several.
        call = (
            "do { static const ::fa2::emulation::Program& program_ = ::fa2::emulation::parse(" + template + "); "
            "::fa2::emulation::execute(program_, {" + ", ".join(listed) + "}); } while (0)"
        )
        result += [text[at : match.start()], call]
        at = end + 1
    return "".join([*result, text[at:]])


def translate(text: str) -> str:
    text = _COMMENT.sub("", text)
    text = _assembly(text)
    text = _OPERAND.sub(lambda m: "::fa2::emulation::output(" if m.group(1) else "::fa2::emulation::input(", text)
    text = re.sub(r"(\w+)<<<(.*?)>>>\(", r"::fa2::emulation::launch(\2)(\1, ", text, flags=re.S)
    text = re.sub(r"\(\s*(\w+), \)", r"(\1)", text)
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];",
        r"unsigned char* const \1 = ::fa2::emulation::shared_memory;",
        text,
    )
    return re.sub(r"#pragma unroll[^\n]*", "", text)


def translate_tree(source: Path, target: Path, edits: dict[str, list[tuple[str, str]]] | None = None) -> None:
    """Copy `source` (csrc) to `target`, translated. `edits`: by file, texts to replace first; each must occur."""
    shutil.rmtree(target, ignore_errors=True)
    edits = dict(edits or {})
    for path in sorted(source.rglob("*")):
        if path.suffix not in {".h", ".cuh"}:
            continue
        name = path.relative_to(source).as_posix()
        text = path.read_text()
        for old, new in edits.pop(name, []):
            if old not in text:
                raise ValueError(f"{name} does not contain {old!r}")
            text = text.replace(old, new)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(translate(text))
    if edits:
        raise ValueError(f"no such files: {sorted(edits)}")
