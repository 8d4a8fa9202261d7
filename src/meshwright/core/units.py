"""Sizes and times as people write them, and as people read them.

Values store plain bytes and seconds; GiB and ms exist only at the borders.
"""

from __future__ import annotations

import re
from math import isfinite

from meshwright.core.errors import InputError, nearest

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

BYTE_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
}  # fmt: skip
SECOND_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`72GiB`, `1.5 GB`, `4096B` → bytes. A number without a unit is refused: 72 what?"""
    return round(_quantity(text, BYTE_UNITS, example="72GiB"))


def parse_seconds(text: str) -> float:
    """`3ms`, `1.5 s`, `2min` → seconds."""
    return _quantity(text, SECOND_UNITS, example="3ms")


def format_bytes(num_bytes: float) -> str:
    """Two places in the smallest binary unit that shows a number under 1024; beyond that, TiB."""
    if abs(round(num_bytes)) < KIB:
        return f"{num_bytes:.0f} B"
    for unit, factor in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB)):
        if round(abs(num_bytes) / factor, 2) < 1024:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / TIB:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds, milliseconds or microseconds, whichever reads best."""
    if abs(seconds) >= 100:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def format_duration(seconds: float) -> str:
    """How long people wait: seconds, minutes or hours."""
    for unit, factor in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_count(number: float) -> str:
    """Parameters and tokens: 33.7M, 175B."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"


def ceil_div(numerator: int, denominator: int) -> int:
    """Integer division rounded up."""
    return -(-numerator // denominator)


def _quantity(text: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"'{text}' is not a number with a unit: write it like '{example}'")
    number, unit = match.groups()
    if unit not in units:
        said = f"has the unknown unit '{unit}'" if unit else "has no unit"
        hint = nearest(unit, units) if unit else f"write it like '{example}'"
        raise InputError(f"'{text}' {said}: {hint}")
    quantity = float(number) * units[unit]
    if not isfinite(quantity):
        raise InputError(f"'{text}' is too large for a number here: write it like '{example}'")
    return quantity
