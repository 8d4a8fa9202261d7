"""Points that offload parameters, whose plans stream them from the host: these plans, and lower bounds on them.

Streaming runs on one device, or on data-parallel ranks with ZeRO 3, in one stage whose repeated blocks are all recomputed in full
(rules/limits.py). A point stands for few such plans, which differ in what streaming leaves open:        -> streamed_plans

    window   as few blocks as possible: more of them need memory, and no step is faster (cost/parameter_offload.py)
    stash    the inputs of blocks wait on the device; where they do not fit there, on the host, which may cost time

Lower bound on seconds. F is the least forward of a step, B its least backward with the recompute, and T(F, B) what
cost/parameter_offload.py adds to them:

    step ≥ F + B' + T(F, B'),   B' = max(B, the link's traffic under backward)                          -> Streamed.seconds

A longer forward hides no more of the link's time than it takes itself. The same holds for a longer backward, unless backward waits
for the link: then more of the host's update is hidden for nothing. B' takes this into account.
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
from meshwright.cost.parameter_offload import StreamedCost
from meshwright.rules.limits import not_yet
from meshwright.rules.plain_plan import recompute_rules
from meshwright.searching.bounds.step_seconds import SLACK, Bounds, Needs
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point


def streamed_plans(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The fastest plan first, each with fewer bytes on the device than the one before; none where the runtime cannot run them."""
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
    """The fastest plan that fits the device and the host. Where none fits: None if it must fit, else the one that is nearest."""
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
    """Lower bounds on the plans of one point."""

    bounds: Bounds
    point: Point
    quickest: StreamedCost
    smallest: StreamedCost

    @cached_property
    def least_bytes(self) -> float:
        """Peak bytes of a device."""
        return self.smallest.worst().memory.total

    @property
    def least_host_bytes(self) -> int:
        """Bytes of one host."""
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
        """The least seconds that are added to the work of a step, whatever the number of microbatches. Recompute is a part."""
        count = self.point.shape.num_microbatches
        last = self.quickest.seconds_given(self.bounds.problem.cluster, float("inf"), float("inf"))
        return SLACK * (count * self.again + last.update_seconds + self.bounds.after(self.point))

    @property
    def again(self) -> float:
        """Seconds of recompute in a microbatch."""
        table = self.bounds.table
        return float(table.backward(0, table.num_units, "full")) - self.bounds.backward_seconds

    @property
    def seconds(self) -> float:
        """Seconds of a step, from its compute and the link's traffic."""
        count, cluster = self.point.shape.num_microbatches, self.bounds.problem.cluster
        forward = count * self.bounds.forward_seconds
        backward = count * (self.bounds.backward_seconds + self.again)
        waiting = max(backward, self.quickest.backward_link_seconds(cluster))
        more = self.quickest.seconds_given(cluster, forward, waiting)
        return forward + waiting + more.transfer_seconds + more.update_seconds + self.bounds.after(self.point)
