"""Where no plan fits: the plans that are over the budget by least, and the changes that make the nearest of them fit.

Where there is no plan at all, the error says why.
"""

from __future__ import annotations

import heapq
from itertools import islice
from math import prod

import msgspec

from meshwright.core.axes import RANK_AXES
from meshwright.core.errors import PlanError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.result import WayOut
from meshwright.searching.cuts.best_cut import best_cut
from meshwright.searching.infeasible.plain_refusal import plain_refusal
from meshwright.searching.infeasible.suggestions import ways_out
from meshwright.searching.joint.best_first import BestFirst
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape, families, meshes, points, turns, worlds
from meshwright.searching.units import even_cut

MOST_NEAREST = 8
"""Points that are costed to find the nearest miss, for every kind of offload."""


def nearest_misses(found: BestFirst) -> list[tuple[Plan, Estimate]]:
    """The plans of the points with the least bound on memory, costed."""
    problem, drafts = found.problem, found.drafts
    over: list[tuple[float, int, Point]] = []
    for world in worlds(problem):
        for mesh in meshes(problem, world):
            for family in families(problem, mesh):
                over += _over(problem, drafts, list(dict.fromkeys([*family[-1:], *family[:1]])), len(over))
        if over:
            break
    for offload in problem.offloads:  # each, since hosts may have no room for what needs least on the devices
        for _, _, point in heapq.nsmallest(MOST_NEAREST, (one for one in over if one[2].offload == offload)):
            _cost(found, point)
    if not found.costed:
        raise _nothing(problem, drafts)
    return found.costed


def _cost(found: BestFirst, point: Point) -> None:
    """Costs the point with an even cut. Where this does not fit, costs it also with the best cut for the memory of its stages."""
    found.cost(point, even_cut(found.drafts.units, point.num_stages, found.problem.request.ends))
    bounds, room = found.drafts.bounds(point), found.drafts.room(point)
    if bounds is None or room is None or found.fastest is not None or point.num_stages == 1:
        return
    best = best_cut(bounds, room)
    if best is not None:
        found.cost(point, best[0])


def changes_that_fit(problem: Problem, costed: list[tuple[Plan, Estimate]]) -> list[tuple[Plan, Estimate]]:
    """The changes that the request allows and that make the nearest miss fit on the same hosts."""
    plan, estimate = min(costed, key=lambda pair: pair[1].peak_bytes)
    return [(way.plan, way.estimate) for way in ways_out(problem, plan, estimate) if _is_open(problem, way)]


def _is_open(problem: Problem, way: WayOut) -> bool:
    """Whether the search could have found this plan without another request, cluster or budget."""
    same = way.plan.cluster == problem.cluster_hash and way.estimate.budget_bytes == problem.budget
    allowed = not way.leave_out and not way.not_yet and problem.world in (None, way.plan.world)
    return same and allowed and way.estimate.fits and problem.hosts_hold(way.estimate.host_bytes)


def _over(problem: Problem, drafts: Drafts, shapes: list[Shape], number: int) -> list[tuple[float, int, Point]]:
    """(Least bytes, number, point) for every state under the first schedule. shapes: the smallest microbatch of a family, and the
    largest, which keeps no gradients of earlier microbatches."""
    found: list[tuple[float, int, Point]] = []
    for shape in shapes:
        for schedule, virtual in islice(turns(problem, shape), 1):
            for point in points(problem, shape, schedule, virtual):
                if (needed := drafts.least_bytes(point)) is not None:
                    found.append((needed, number + len(found), point))
    return found


def _nothing(problem: Problem, drafts: Drafts) -> PlanError:
    """The error where no candidate agrees with the request. It gives the reason that a plain plan is refused for."""
    degrees = {axis: problem.request.degrees[axis] for axis in RANK_AXES}
    needed = prod(degree or 1 for degree in degrees.values())
    asked = " · ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree is not None)
    if needed > problem.devices:
        return PlanError(
            f"{asked} needs {needed} ranks, but there are {problem.devices}: lower a degree or use more devices"
        )
    if (problem.world is not None and problem.world % needed) or (None not in degrees.values() and not worlds(problem)):
        return PlanError(f"{asked} needs {needed} ranks, but there are {problem.world}: make them equal")
    world = needed if problem.request.dp is not None else worlds(problem)[0]
    wish = msgspec.structs.replace(problem.request, global_batch=problem.global_batch)
    if wish.hybrid is not None and wish.zero is None:
        wish = msgspec.structs.replace(wish, zero=1)  # the least that has sharding groups
    if wish.offload == "parameters" and problem.graph.repeated_blocks:
        wish = msgspec.structs.replace(wish, recompute=wish.recompute or "full")  # as every streamed plan has it
    refused = drafts.refusals[-1] if drafts.refusals else "leave a degree open"
    return plain_refusal(problem, wish, world) or PlanError(
        f"no plan for {world} ranks agrees with what was asked for: {refused}"
    )
