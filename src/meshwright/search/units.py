"""Units: what a stage is made of. A unit is a repeated block with the blocks behind it that do not repeat.

Stages begin at repeated blocks; those before the first repeated block go with the first unit. A model without repeated blocks is
one unit.
"""

from __future__ import annotations

from meshwright.core.graph import Graph
from meshwright.core.names import compact_names
from meshwright.core.placement import coordinate_of
from meshwright.core.plan import ScheduleKind, Stage, placement_of

Cut = tuple[int, ...]
"""Where each stage ends: the number of units before it. The last one is the number of units."""


FEW_UNITS = 12
"""No more units than these are cut in every way there is."""


def least_size(num_units: int, num_stages: int) -> int:
    """Units of the smallest stage that is looked at, where a coordinate has several: in deep models about even."""
    return 1 if num_units <= FEW_UNITS else max(1, num_units // num_stages - 1)


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


def stages_of(units: tuple[tuple[str, ...], ...], cut: Cut, pp: int, schedule: ScheduleKind) -> tuple[Stage, ...]:
    """The stages of a cut, laid over the coordinates as the schedule asks."""
    begins = (0, *cut[:-1])
    return tuple(
        Stage(
            coordinate=coordinate_of(number, pp, placement_of(schedule)),
            blocks=compact_names(name for unit in units[begin:end] for name in unit),
        )
        for number, (begin, end) in enumerate(zip(begins, cut, strict=True))
    )
