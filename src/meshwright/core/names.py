"""Block names in the compact form a plan uses.

    "blocks.0-23"     blocks.0, blocks.1, … blocks.23
    "blocks.0-22/2"   every second of them: blocks.0, blocks.2, … blocks.22

so that a plan for 96 blocks stays readable on one screen. Only plain numbers count (`3`, not `03`); a module whose own
name looks like a range is refused, because a plan could not tell the two apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from meshwright.core.bounds import MOST_BLOCKS
from meshwright.core.errors import InputError, shortened

MOST_DIGITS = 18
"""Of a number in a name; a module's own name may have more, but is no range."""
_NUMBER = "0|[1-9][0-9]*"
_RANGE = re.compile(
    rf"(?P<stem>.*\.)(?P<first>{_NUMBER})-(?P<last>{_NUMBER})(?:/(?P<stride>{_NUMBER}))?(?P<tail>\..*)?"
)
_NUMBERED = re.compile(rf"(?P<stem>.*\.)(?P<index>{_NUMBER})")


def expand_names(patterns: Iterable[str]) -> tuple[str, ...]:
    """All names, in order."""
    names: list[str] = []
    for pattern in patterns:
        names += _expand(pattern)
        if len(names) > MOST_BLOCKS:
            raise InputError(
                f"'{shortened(pattern)}' makes more than {MOST_BLOCKS} blocks, the most that a plan may name"
            )
    return tuple(names)


def compact_names(names: Iterable[str]) -> tuple[str, ...]:
    """The shortest patterns that expand to exactly these names in this order."""
    patterns: list[str] = []
    run: list[tuple[str, int]] = []
    for name in names:
        if _RANGE.fullmatch(name):
            raise InputError(f"the module name '{name}' reads as a range of blocks in a plan: rename the module")
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


def is_list_item(name: str) -> bool:
    """Whether a module is one of a list (`blocks.3`), as repeated blocks are."""
    return name.rpartition(".")[2].isdigit()


@lru_cache(maxsize=1024)  # plans of one model name the same few again and again
def _expand(pattern: str) -> tuple[str, ...]:
    match = _RANGE.fullmatch(pattern)
    if match is None:
        return (pattern,)
    if max(len(match["first"]), len(match["last"]), len(match["stride"] or "")) > MOST_DIGITS:
        raise InputError(
            f"'{shortened(pattern)}' has a number of more than {MOST_DIGITS} digits: no model has such a block"
        )
    first, last, stride = int(match["first"]), int(match["last"]), int(match["stride"] or 1)
    if last < first or stride < 1:
        raise InputError(f"'{pattern}' names no block: give the smaller number first, and a stride of 1 or more")
    if (last - first) // stride >= MOST_BLOCKS:
        raise InputError(f"'{pattern}' names {(last - first) // stride + 1} blocks: a plan names at most {MOST_BLOCKS}")
    stem, tail = match["stem"], match["tail"] or ""
    return tuple(f"{stem}{index}{tail}" for index in range(first, last + 1, stride))


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
