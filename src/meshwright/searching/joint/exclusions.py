"""What the joint search leaves out of the plans that flags can ask for, in words.

Numbers of devices are named where their work, evenly shared out, could take less than the best plan. What else is named has no
bound: a flag that asks for it makes it searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.plan import Mesh
from meshwright.rules.divisors import divisors
from meshwright.searching.bounds.memory import has_like_stages
from meshwright.searching.joint.best_first import BestFirst
from meshwright.searching.problem import Problem
from meshwright.searching.space import MOST_VIRTUAL, SMALL_DP, Shape, Way, has_many_cuts, is_deep, worlds

SHOWN_NUMBERS = 3


def left_out(found: BestFirst) -> tuple[str, ...]:
    problem = found.problem
    return (
        *_numbers_of_devices(found),
        *((*_schedules(problem), *_unlike_stages(found)) if _may_have_stages(problem) else ()),
        *_groups(problem),
        *found.drafts.tables.unsplit,
    )


def _numbers_of_devices(found: BestFirst) -> Iterator[str]:
    problem, request = found.problem, found.problem.request
    if problem.world is not None or None not in (request.dp, request.pp, request.tp, request.cp):
        return
    tried = set(worlds(problem))
    left = [world for world in range(problem.devices, 0, -1) if world not in tried and found.could_use(world)]
    if left:
        first = ", ".join(str(world) for world in left[:SHOWN_NUMBERS])
        yield f"{first} {'… ' if len(left) > SHOWN_NUMBERS else ''}devices"


def _may_have_stages(problem: Problem) -> bool:
    request = problem.request
    most = problem.devices // prod(degree or 1 for degree in (request.dp, request.tp, request.cp))
    return request.pp != 1 and most > 1 and problem.most_stages > 1


def _schedules(problem: Problem) -> Iterator[str]:
    request = problem.request
    if request.schedule is None:
        for name, kind in KINDS.items():
            is_left_out = not kind.is_searched or (has_many_cuts(problem) and kind.keeps_all)
            if is_left_out and (request.virtual is None or kind.runs(request.virtual)):
                yield f"schedule {name}"
    most = problem.most_stages // (request.pp or 2)
    if request.schedule in (None, "interleaved") and request.virtual is None:
        if most > MOST_VIRTUAL:
            yield f"more than {MOST_VIRTUAL} stages a coordinate"
        if is_deep(problem):
            yield "more than two stages a coordinate where they are not of equal size"


def _unlike_stages(found: BestFirst) -> Iterator[str]:
    """Where bounds take the stages of deep models for alike (bounds/memory.py)."""
    problem = found.problem
    bounds = found.drafts.tables.bounds(Shape.of(Mesh(), Way(), 1, 1), sharded=False)
    several = problem.request.virtual is None or problem.request.virtual > 1
    if several and has_many_cuts(problem) and bounds is not None and has_like_stages(problem, bounds.table):
        yield "several stages a coordinate that differ by more than a block, the first and the last aside"


def _groups(problem: Problem) -> Iterator[str]:
    """Of a large dp, not all sizes of sharding groups are looked at."""
    request = problem.request
    degrees = [request.dp] if request.dp is not None else divisors(problem.global_batch)
    most = problem.devices // ((request.tp or 1) * (request.cp or 1) * (request.pp or 1))
    if request.zero != 0 and request.hybrid is None and any(SMALL_DP < dp <= most for dp in degrees):
        yield f"sharding groups other than 1, 2, 4 … hosts' ranks of more than {SMALL_DP} data-parallel ranks"
