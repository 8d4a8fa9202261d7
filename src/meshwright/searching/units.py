"""Units: what a stage is made of. A unit is a repeated block with the non-repeated blocks that follow it.

Stages begin at repeated blocks. The blocks before the first repeated block belong to the first unit. A model without repeated
blocks is one unit.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from meshwright.core.graph import Graph
from meshwright.rules.stages import even_counts

Cut = tuple[int, ...]
"""Where each stage ends: the number of units before it. The last one is the number of units."""
FEW_UNITS = 12
"""A model with at most this many units is not deep: the search tries every schedule and number of stages."""


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
    """The cut that a plain plan has."""
    return tuple(accumulate(even_counts(num_units, num_stages)))
