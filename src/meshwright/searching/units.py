"""Units: what a stage is made of. A unit is a repeated block with the blocks behind it that do not repeat.

Stages begin at repeated blocks; those before the first repeated block go with the first unit. A model without repeated blocks is
one unit.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from meshwright.core.graph import Graph
from meshwright.rules.stages import even_counts

Cut = tuple[int, ...]
"""Where each stage ends: the number of units before it. The last one is the number of units."""
FEW_UNITS = 12
"""Models of no more units than these are not deep: every schedule and number of stages is looked at."""


def units_of(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The blocks of every unit, in order."""
    found: list[list[str]] = [[]]
    seen = False
    for block in graph.blocks:
        if not block.name:
            continue
        if block.repeated and seen:
            found.append([])
        seen = seen or block.repeated
        found[-1].append(block.name)
    return tuple(tuple(unit) for unit in found)


def sizes_of(cut: Cut) -> list[int]:
    """Units of each stage."""
    return [end - begin for begin, end in pairwise((0, *cut))]


def even_cut(num_units: int, num_stages: int) -> Cut:
    """As a plain plan is cut."""
    return tuple(accumulate(even_counts(num_units, num_stages)))
