"""Allocations: births paired with deaths, and the memory a step holds over time.

in use at t = what was held before the step + Σ bytes of allocations with born ≤ t < died
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from meshwright.core.estimate import MemoryParts
from meshwright.core.run.trace import MemoryPoint
from meshwright.measure.profile import Change


@dataclass(frozen=True)
class Allocation:
    """A stretch of memory from its birth to its death, or to the end of the step (infinity)."""

    address: int
    num_bytes: int
    born: float
    died: float
    thread: Any = None
    death_seen: bool = True
    """The profiler does not follow every thread of a communication backend, and misses what dies there."""


def pair(changes: Iterable[Change]) -> list[Allocation]:
    """Births with deaths by address, in the order of births.

    A death without a birth belongs to what was held before. A birth where something lives already means that its death was
    not seen.
    """
    born: dict[int, Change] = {}
    found = []
    for change in changes:
        if change.address in born:
            found.append(_allocation(born.pop(change.address), change.at, seen=change.num_bytes < 0))
        if change.num_bytes > 0:
            born[change.address] = change
    found += [_allocation(change, inf, seen=False) for change in born.values()]
    return sorted(found, key=lambda allocation: allocation.born)


def _allocation(birth: Change, died: float, *, seen: bool) -> Allocation:
    return Allocation(birth.address, birth.num_bytes, birth.at, died, birth.thread, seen)


def over_time(held: MemoryParts, allocations: list[tuple[Allocation, str]], end: float) -> list[MemoryPoint]:
    """Memory by category after every change, from the beginning of the step to its end."""
    changes = [(a.born, a.num_bytes, category) for a, category in allocations]
    changes += [(a.died, -a.num_bytes, category) for a, category in allocations if a.died <= end]
    sums = Counter({name: getattr(held, name) for name in held.__struct_fields__})
    points = [MemoryPoint(at_seconds=0.0, memory_bytes=held)]
    for at, num_bytes, category in sorted(changes, key=lambda change: change[0]):
        sums[category] += num_bytes
        points.append(MemoryPoint(at_seconds=max(at, 0.0), memory_bytes=MemoryParts(**sums)))
    return points


def peak(points: Iterable[MemoryPoint]) -> MemoryPoint:
    return max(points, key=lambda point: point.memory_bytes.total)
