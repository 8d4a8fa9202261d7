"""Lines of `metrics.jsonl`: what a step leaves. An object of numbers, one of them its `step`."""

from __future__ import annotations

import json
from typing import Any

from meshwright.core.bounds import MOST_COUNT
from meshwright.core.errors import InputError


def parse_line(line: str | bytes) -> dict[str, Any]:
    """One line, or an `InputError` that says what is wrong with it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        # no text, no JSON, thousands of digits, or nested too deeply
        raise InputError("not valid JSON") from None
    if not isinstance(entry, dict) or not _is_step(entry.get("step")) or not all(map(_is_number, entry.values())):
        raise InputError("not what a step leaves")
    return entry


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def _is_number(value: object) -> bool:
    """Any float: a run that diverges writes NaN. A whole number that no float holds is none that a step counts."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= MOST_COUNT)
