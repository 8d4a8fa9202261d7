"""The stages of many cuts of one point, as arrays with a row for each cut and a column for each stage, and lower bounds from them.

Stage s takes f_s and b_s seconds of a microbatch and sends it on in h_s, to the stage behind it and back. With m microbatches no
step is shorter than

    a coordinate   the wait until its first stage is reached, and back behind it + m Σ of its (f + b)      -> _busy
    a link         the wait until its first message + m Σ of its h + what follows its last message         -> _links
    one stage a coordinate: a microbatch through all stages + the heaviest weight (core/pipeline/kinds.py) -> least_seconds
    the schedule, played with these seconds (played_together.py)                                           -> played_seconds
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from meshwright.core.pipeline.kinds import kind_of
from meshwright.cost.estimate import transfers_of
from meshwright.rules.schedules import make_order
from meshwright.searching.bounds.memory import Room
from meshwright.searching.bounds.step_seconds import SLACK, Bounds
from meshwright.searching.cuts.best_cut import StageLoads
from meshwright.searching.cuts.played_together import StageOfMany, steps_of_many
from meshwright.searching.space import Point
from meshwright.searching.unit_table import Places, Row

NEVER = 1e15
"""Seconds of a recompute that does not suffice."""


@dataclass(frozen=True)
class StagesOfCuts:
    bounds: Bounds
    point: Point
    forward: Row
    backward: Row
    weights: Row
    """The part of backward that makes gradients of weights."""
    gather_once: Row
    reduce_once: Row
    hops: Row
    """Seconds of a message to the next stage; 0 where it lies on the same coordinate."""

    def played_seconds(self) -> Row:
        point, problem = self.point, self.bounds.problem
        order = make_order(point.schedule, point.shape.pp, point.shape.num_microbatches, point.virtual)
        parts = (self.forward, self.backward, self.weights, self.gather_once, self.reduce_once, self.hops)
        stages = [StageOfMany(*(part[:, stage] for part in parts)) for stage in range(point.num_stages)]
        return self._with_overhead(steps_of_many(order, stages, transfers_of(problem.recipe, problem.cluster)))

    def least_seconds(self) -> Row:
        """A lower bound that needs no play."""
        point, m = self.point, self.point.shape.num_microbatches
        found = np.maximum(self._busy(m), self._links(m))
        if point.virtual == 1 and m > 1:
            weigh, p = kind_of(point.schedule).stage_weight, point.num_stages
            weights = [weigh(stage, p, m, self.forward[:, stage], self.backward[:, stage]) for stage in range(p)]
            found = np.maximum(found, self._through + np.max(weights, axis=0))
        return self._with_overhead(found)

    def _with_overhead(self, seconds: Row) -> Row:
        return np.asarray(SLACK * (seconds + self.bounds.overhead))

    @property
    def _splits_backward(self) -> bool:
        return kind_of(self.point.schedule).splits_backward

    @property
    def _through(self) -> Row:
        """Seconds of the first microbatch through all stages; where backward is split, gradients of its inputs are not counted."""
        one_way = (self.forward + self.hops).sum(axis=1)
        return np.asarray(one_way if self._splits_backward else one_way + (self.backward + self.hops).sum(axis=1))

    def _busy(self, m: int) -> Row:
        each = self.forward + self.hops
        if not self._splits_backward:
            each = each + self.backward + self.hops
        before = np.cumsum(each, axis=1) - each
        work = m * (self.forward + self.backward)
        found = before[:, : self.point.shape.pp].copy()
        for stage, home in enumerate(self.point.homes):
            found[:, home] += work[:, stage]
        return np.asarray(found.max(axis=1))

    def _links(self, m: int) -> Row:
        """The last message over a link is that of its last stage: a microbatch goes over it once for each of its stages."""
        found = np.zeros(len(self.forward))
        stages_by_link: dict[tuple[int, int], list[int]] = {}
        for stage, link in enumerate(pairwise(self.point.homes)):
            if link[0] != link[1]:
                stages_by_link.setdefault(link, []).append(stage)
        back = 0.0 if self._splits_backward else (self.backward + self.hops).sum(axis=1)
        for stages in stages_by_link.values():
            first, last = stages[0], stages[-1]
            before = self.forward[:, : first + 1].sum(axis=1) + self.hops[:, :first].sum(axis=1)
            after = (self.forward + self.hops)[:, last + 1 :].sum(axis=1) + back
            found = np.maximum(found, before + m * self.hops[:, stages].sum(axis=1) + after)
        return found


def plain_stages(bounds: Bounds, point: Point, cuts: Places) -> StagesOfCuts:
    """Without recompute, whatever the state of the point. cuts: one row a cut, where each stage ends."""
    begins, table = begins_of(cuts), bounds.table
    is_sent = np.array([*(here != there for here, there in pairwise(point.homes)), False])
    nothing = np.zeros(cuts.shape)
    return StagesOfCuts(
        bounds=bounds,
        point=point,
        forward=table.forward(begins, cuts),
        backward=table.backward(begins, cuts),
        weights=table.weights[cuts] - table.weights[begins],
        gather_once=nothing,
        reduce_once=nothing,
        hops=bounds.hops(point.shape)[cuts - 1] * is_sent,
    )


def stages_in(bounds: Bounds, room: Room, cuts: Places) -> StagesOfCuts:
    """With what stages do not hide of their own gathers and reductions at least, and with the recompute they need."""
    point = room.point
    plain, begins = plain_stages(bounds, point, cuts), begins_of(cuts)
    gather, reduce_each, reduce_once = bounds.exposed_of_rows(point, begins, cuts)
    in_each = point.zero == 3
    return replace(
        plain,
        forward=plain.forward + gather if in_each else plain.forward,
        backward=plain.backward + reduce_each + _recompute(bounds, room, begins, cuts),
        gather_once=plain.gather_once if in_each else gather,
        reduce_once=reduce_once,
    )


def _recompute(bounds: Bounds, room: Room, begins: Places, ends: Places) -> Row:
    """Seconds of recompute that each stage needs at least. Of several on a coordinate, any of them may be recomputed: 0."""
    found = np.zeros(ends.shape)
    if room.point.virtual == 1:
        loads = StageLoads(bounds, room)
        for stage in range(ends.shape[1]):
            found[:, stage] = loads.again(stage, loads.rows(begins[:, stage], ends[:, stage]))
    return np.minimum(found, NEVER)


def begins_of(cuts: Places) -> Places:
    return np.hstack([np.zeros((len(cuts), 1), np.int64), cuts[:, :-1]])
