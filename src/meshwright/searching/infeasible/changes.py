"""A change of a plan that does not fit. Each change is a plan, and is costed as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from meshwright.core.errors import MeshwrightError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.units import GIB, ceil_div, format_bytes
from meshwright.searching.problem import Problem


@dataclass(frozen=True)
class Change:
    """A changed plan, on a problem that may have more hosts or a larger budget."""

    words: str
    plan: Plan
    problem: Problem
    estimate: Estimate
    changes: tuple[str, ...]
    """Fields of the request that the change touches."""

    @property
    def fits(self) -> bool:
        room = self.problem.cluster.host_memory_bytes
        return self.estimate.fits and (room is None or self.estimate.host_bytes <= room)

    @property
    def cost(self) -> float:
        return self.estimate.step_seconds * max(self.plan.world, self.problem.cluster.num_devices)


def costed(words: str, problem: Problem, plan: Plan, touched: tuple[str, ...], **changes: object) -> Change | None:
    """The changed plan with its estimate; None where it is no legal plan, or where the cluster lacks a figure it needs."""
    try:
        changed = msgspec.structs.replace(plan, **changes)
        return Change(words, changed, problem, problem.cost(changed), touched)
    except MeshwrightError:
        return None


def first_that_fits(changes: Iterable[Change | None]) -> Iterator[Change]:
    """The first change that fits; where none does, all of them."""
    missed = []
    for change in changes:
        if change is not None and change.fits:
            yield change
            return
        missed += [change] if change is not None else []
    yield from missed


def on_larger_hosts(change: Change) -> Change:
    """The change on hosts with the memory it needs, where it fits the devices but not their hosts."""
    cluster, needed = change.problem.cluster, change.estimate.host_bytes
    room = cluster.host_memory_bytes
    if room is None or needed <= room or not change.estimate.fits:
        return change
    larger = ceil_div(needed, GIB) * GIB
    words = f"{change.words}, with {format_bytes(larger)} of memory on a host in place of {format_bytes(room)}"
    hosts = msgspec.structs.replace(cluster, host_memory_bytes=larger)
    return replace(change, words=words, problem=replace(change.problem, cluster=hosts))
