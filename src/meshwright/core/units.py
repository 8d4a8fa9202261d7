"""Sizes and times as people write them, and as people read them.

Values store plain bytes and seconds; GiB and ms exist only at the borders.
"""

from __future__ import annotations

import re

from meshwright.core.errors import InputError, nearest

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
SECOND_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`72GiB`, `1.5 GB`, `4096B` → bytes. A number without a unit is refused: 72 what?"""
    number, factor = _split_quantity(text, BYTE_UNITS, example="72GiB")
    return round(number * factor)


def parse_seconds(text: str) -> float:
    """`3ms`, `1.5 s`, `2min` → seconds."""
    number, factor = _split_quantity(text, SECOND_UNITS, example="3ms")
    return number * factor


def format_bytes(num_bytes: float) -> str:
    """Four significant places in the binary unit that keeps the number under 1024."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds, milliseconds or microseconds, whichever reads best."""
    if abs(seconds) >= 100:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def format_count(number: float) -> str:
    """Parameters and tokens: 33.7M, 175B."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"


def ceil_div(numerator: int, denominator: int) -> int:
    """Integer division rounded up."""
    return -(-numerator // denominator)


def _split_quantity(text: str, units: dict[str, float] | dict[str, int], example: str) -> tuple[float, float]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"'{text}' is not a number with a unit: write it like '{example}'")
    number, unit = match.groups()
    if unit not in units:
        said = f"has the unknown unit '{unit}'" if unit else "has no unit"
        hint = nearest(unit, units) if unit else f"write it like '{example}'"
        raise InputError(f"'{text}' {said}: {hint}")
    return float(number), float(units[unit])
