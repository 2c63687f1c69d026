"""What the benchmarks' records have in common: numbers that can be read, errors in one line."""

from __future__ import annotations

from typing import Any


def rounded(x: Any, digits: int) -> Any:
    """Every float in dicts and lists, to so many significant digits."""
    if isinstance(x, float):
        return float(f"{x:.{digits}g}")
    if isinstance(x, dict):
        return {k: rounded(v, digits) for k, v in x.items()}
    return [rounded(v, digits) for v in x] if isinstance(x, list) else x


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"
