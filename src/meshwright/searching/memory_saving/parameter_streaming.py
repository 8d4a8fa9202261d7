"""Points whose plans stream their parameters: the plans of one, and what none of them can beat.

Streaming runs on one device, or on data-parallel ranks with ZeRO 3, in one stage whose repeated blocks are all recomputed in full
(rules/limits.py). A point stands for few such plans, by what streaming itself leaves open:              -> streamed_plans

    window   as few blocks as can be: more of them take memory, and no step is faster for it (cost/streaming.py)
    stash    the inputs of blocks wait on the device; where that does not fit, on the host, and their traffic may show

Seconds, with F and B a step's forward and its backward with all that is done again, as little as they can be, and T(F, B) what
cost/streaming.py adds to them:

    step ≥ F + B' + T(F, B'),   B' = max(B, the link's traffic under backward)                          -> Streamed.seconds

A longer forward hides no more of the link than it takes itself. So does a longer backward, but for one that the link makes wait: it
hides more of the host's update for nothing. B' has done so already.
Bytes are those of the cost room, with the inputs on the host.                                          -> Streamed.least_bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.cost.estimate import Estimator
from meshwright.cost.microbatch import Microbatch
from meshwright.cost.streaming import StreamedCost
from meshwright.rules.limits import not_yet
from meshwright.rules.plain_plan import recompute_rules
from meshwright.searching.bounds.step_seconds import SLACK, Bounds, Needs
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point


def streamed_plans(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The quickest first, each with less on the device than the one before; none where the runtime cannot run them."""
    blocks = problem.graph.repeated_blocks
    if not blocks:
        return
    rules = recompute_rules(problem.request.recompute or "full", blocks)
    for stash in ("device", "host"):
        offload = msgspec.structs.replace(plan.offload, stash=stash)
        found = msgspec.structs.replace(plan, recompute=rules, offload=offload)
        if not not_yet(found):
            yield found


def fitted_streamed(
    problem: Problem, plan: Plan, microbatch: Microbatch, *, must_fit: bool = False
) -> tuple[Plan, Estimate] | None:
    """The quickest that fits the device and the host; where none does, the one that comes nearest, or None if it must fit."""
    nearest: tuple[Plan, Estimate] | None = None
    for one in streamed_plans(problem, plan):
        estimator = Estimator(problem.graph_of(one), one, problem.cluster, problem.recipe, microbatch=microbatch)
        found = estimator.estimate(problem.budget_bytes)
        if problem.hosts_hold(found.host_bytes):
            nearest = (one, found)
            if found.fits:
                break
    return None if must_fit and nearest is not None and not nearest[1].fits else nearest


@dataclass(frozen=True)
class Streamed:
    """Bounds on the plans of one point."""

    bounds: Bounds
    point: Point
    quickest: StreamedCost
    smallest: StreamedCost

    @property
    def least_bytes(self) -> float:
        """At the fullest moment of a device."""
        return self.smallest.worst().memory.total

    @property
    def least_host_bytes(self) -> int:
        """Of one host."""
        ranks = min(self.point.shape.world, self.bounds.problem.cluster.devices_per_host)
        return ranks * self.quickest.host_bytes()

    @cached_property
    def needs(self) -> Needs:
        bounds, shape = self.bounds, self.point.shape
        exposed, once = bounds.exposed(self.point, self.again)
        each, once = exposed + self.again, once + bounds.after(self.point)
        work = bounds.forward_seconds + bounds.backward_seconds + each
        seconds = max(shape.num_microbatches * work + once, self.seconds)
        return Needs(each, seconds - shape.num_microbatches * work, SLACK * seconds)

    @property
    def once(self) -> float:
        """What is added to the work of a step at least, however many microbatches it is done in; the recompute is of these."""
        count = self.point.shape.num_microbatches
        last = self.quickest.seconds_beside(self.bounds.problem.cluster, float("inf"), float("inf"))
        return SLACK * (count * self.again + last.update_seconds + self.bounds.after(self.point))

    @property
    def again(self) -> float:
        """Seconds of recompute in a microbatch."""
        table = self.bounds.table
        return float(table.backward(0, table.num_units, "full")) - self.bounds.backward_seconds

    @property
    def seconds(self) -> float:
        """Of a step, from its work and the link's."""
        count, cluster = self.point.shape.num_microbatches, self.bounds.problem.cluster
        forward = count * self.bounds.forward_seconds
        backward = count * (self.bounds.backward_seconds + self.again)
        waiting = max(backward, self.quickest.backward_link_seconds(cluster))
        more = self.quickest.seconds_beside(cluster, forward, waiting)
        return forward + waiting + more.transfer_seconds + more.update_seconds + self.bounds.after(self.point)
