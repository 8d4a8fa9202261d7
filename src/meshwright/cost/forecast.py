"""One predicted step, moment by moment: (Graph, Plan, Cluster) → Forecast.

    work     the played schedule (cost/play.py); after the last backward come the update and the exposed copies to and from the
             host
    memory   along the work of a coordinate: the bytes that microbatches in flight hold, and inside an action the fullest moment
             of each pass (cost/memory/peak_memory.py); a pass takes a share of the action's time in proportion to its work

A step of many microbatches is shown with as many as fill the pipeline: between its beginning and its end it repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import Graph
from meshwright.core.pipeline.schedule import Action
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.run.trace import Forecast, MemoryPoint, Planned
from meshwright.cost.estimate import Estimator
from meshwright.cost.memory.peak_memory import Moment
from meshwright.cost.memory.rank_state import RankState
from meshwright.cost.play import Span, enough_microbatches, play, timeline
from meshwright.rules.downsampling import downsampled
from meshwright.rules.schedules import make_order

MOST_ACTIONS = 8192
"""Forwards and backwards of all coordinates that are shown one by one."""


def forecast(graph: Graph, plan: Plan, cluster: Cluster, recipe: Recipe | None = None) -> Forecast:
    """When a plan's work is predicted to run, and what memory it takes meanwhile."""
    estimator = Estimator(graph, plan, cluster, recipe or Recipe())
    count = plan.num_microbatches
    if 2 * count * len(plan.stages) > MOST_ACTIONS:
        count = enough_microbatches(plan.schedule, plan.mesh.pp, count)
    order, seconds = make_order(plan.schedule, plan.mesh.pp, count, plan.virtual), estimator.stages
    spans = timeline(order, seconds, estimator.transfers)
    play_of_all = play(order, seconds, estimator.transfers)
    played, worst = play_of_all.step_seconds, play_of_all.busiest
    after = estimator.after_seconds(worst, estimator.played().step_seconds)
    extras = [min(after, estimator.after_seconds(coordinate, played)) for coordinate in range(plan.mesh.pp)]
    extras[worst] = after
    return Forecast(
        step_seconds=played + after,
        num_microbatches=count,
        work=tuple(_planned(row, played, extra) for row, extra in zip(spans, extras, strict=True)),
        memory_over_time=tuple(
            downsampled(list(_Curve(estimator, coordinate).points(row, played, extras[coordinate])))
            for coordinate, row in enumerate(spans)
        ),
    )


def _planned(row: Sequence[Span], played: float, extra: float) -> tuple[Planned, ...]:
    """A coordinate's work, and the update of its stages in one."""
    found = [Planned(one.kind, one.stage, one.microbatch, start, end) for one, start, end in row]
    return (*found, Planned("update", row[0].action.stage, 0, played, played + extra))


class _Curve:
    """The memory of one coordinate along its work."""

    def __init__(self, estimator: Estimator, coordinate: int) -> None:
        self.estimator = estimator
        self.device = estimator.cluster.device
        self.cost = estimator.memory
        self.rank_state = estimator.rank_state(coordinate)
        self.at_first = self.rank_state.before_any_backward()
        self._walks: dict[tuple[int, float, bool], tuple[list[Moment], list[Moment]]] = {}

    def points(self, row: Sequence[Span], played: float, extra: float) -> Iterator[MemoryPoint]:
        # between steps: the state, and the buckets that replicas keep
        resting = msgspec.structs.replace(self.rank_state.base, gradients=self.at_first.gradients(set()))
        yield MemoryPoint(at_seconds=0.0, memory_bytes=resting)
        if self.estimator.streamed is None:
            yield from self._along(row)
            yield MemoryPoint(at_seconds=played, memory_bytes=self.rank_state.during_update(self.device))
        else:  # blocks come and go alike all along
            yield MemoryPoint(at_seconds=row[0].start_seconds, memory_bytes=self.estimator.worst_moment().memory)
        yield MemoryPoint(at_seconds=played + extra, memory_bytes=resting)

    def _along(self, row: Sequence[Span]) -> Iterator[MemoryPoint]:
        held, has_gradients = 0.0, False
        for span in row:
            action = span.action
            rank_state = self.rank_state if has_gradients else self.at_first
            kept = self.cost.stage_kept(action.stage)
            others = held if action.kind == "forward" else held - kept
            yield from self._inside(span, others, rank_state)
            if action.kind == "forward":
                held += kept
            else:
                has_gradients = True
                held -= 0.0 if action.kind == "backward_inputs" else kept
            between = self._between(action, rank_state if action.kind == "forward" else self.rank_state, held)
            yield MemoryPoint(at_seconds=span.end_seconds, memory_bytes=between)

    def _inside(self, span: Span, others: float, rank_state: RankState) -> Iterator[MemoryPoint]:
        """Each pass of an action for its share of the time; a backward for weights has no passes of its own."""
        action = span.action
        if action.kind == "backward_weights":
            return
        key = (action.stage, others, rank_state is self.rank_state)
        if key not in self._walks:
            self._walks[key] = self.cost.through_stage(action.stage, others, rank_state, self.device)
        forward, backward = self._walks[key]
        moments = forward if action.kind == "forward" else backward
        work = self.estimator.costs.work
        weights = [work([one.segment]).seconds(self.device) if one.segment else 0.0 for one in moments]
        scale = (span.end_seconds - span.start_seconds) / (sum(weights) or 1.0)
        at = span.start_seconds
        for moment, weight in zip(moments, weights, strict=True):
            yield MemoryPoint(at_seconds=at, memory_bytes=moment.memory)
            at += weight * scale

    def _between(self, action: Action, rank_state: RankState, held: float) -> MemoryParts:
        """After an action: what is in flight, and the gradients so far."""
        done = set() if action.kind == "forward" else set(self.estimator.plan.blocks_by_stage[action.stage])
        return msgspec.structs.replace(
            rank_state.base,
            activations=round(held),
            gradients=rank_state.gradients(done, ""),
            gathered_parameters=rank_state.gathered(""),
        )
