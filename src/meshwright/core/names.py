"""Block names in the compact form a plan uses.

    "blocks.0-23"     blocks.0, blocks.1, … blocks.23
    "blocks.0-22/2"   every second of them: blocks.0, blocks.2, … blocks.22

so that a plan for 96 blocks stays readable on one screen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_RANGE = re.compile(r"(?P<stem>.*\.)(?P<first>\d+)-(?P<last>\d+)(?:/(?P<stride>\d+))?(?P<tail>\..*)?")
_NUMBERED = re.compile(r"(?P<stem>.*\.)(?P<index>\d+)")


def expand_names(patterns: Iterable[str]) -> tuple[str, ...]:
    """All names, in order."""
    return tuple(name for pattern in patterns for name in _expand(pattern))


def compact_names(names: Iterable[str]) -> tuple[str, ...]:
    """The shortest patterns that expand to exactly these names in this order."""
    patterns: list[str] = []
    run: list[tuple[str, int]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        item = (match["stem"], int(match["index"])) if match else None
        if item is None or not _continues(run, item):
            patterns += _close(run)
            run = []
        if item is None:
            patterns.append(name)
        else:
            run.append(item)
    return (*patterns, *_close(run))


def _expand(pattern: str) -> Iterator[str]:
    match = _RANGE.fullmatch(pattern)
    if match is None:
        yield pattern
        return
    for index in range(int(match["first"]), int(match["last"]) + 1, int(match["stride"] or 1)):
        yield f"{match['stem']}{index}{match['tail'] or ''}"


def _continues(run: list[tuple[str, int]], item: tuple[str, int]) -> bool:
    if not run:
        return True
    stem, index = item
    if stem != run[-1][0] or index <= run[-1][1]:
        return False
    return len(run) == 1 or index - run[-1][1] == run[1][1] - run[0][1]


def _close(run: list[tuple[str, int]]) -> list[str]:
    if not run:
        return []
    stem, first = run[0]
    stride = run[1][1] - first if len(run) > 1 else 1
    if len(run) == 1 or (len(run) == 2 and stride > 1):
        return [f"{stem}{index}" for stem, index in run]
    return [f"{stem}{first}-{run[-1][1]}" + (f"/{stride}" if stride > 1 else "")]
