"""Cuts that are played together, and cuts in the order of their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick
from test_bounds import clusters, graphs

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph
from meshwright.core.pipeline.kinds import KINDS, ScheduleKind
from meshwright.core.request import PlanRequest
from meshwright.cost.play import play
from meshwright.cost.timing import StageSeconds, Transfers
from meshwright.rules.schedules import make_order
from meshwright.searching.cuts.played_together import StageOfMany, steps_of_many
from meshwright.searching.cuts.ranked_cuts import RankedCuts, can_rank
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape
from meshwright.searching.units import every_cut, num_cuts

PARTS = ("forward", "backward", "weights", "gather_once", "reduce_once", "transfer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transfers", ["asynchronous", "requested", "blocking"])
@quick
@given(st.data())
def test_cuts_played_together_take_what_each_takes_alone(
    kind: ScheduleKind, transfers: Transfers, data: st.DataObject
) -> None:
    pp, m = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 6))
    m = max(m, KINDS[kind].least_microbatches(pp))
    virtual = data.draw(st.integers(KINDS[kind].turns[0], min(KINDS[kind].turns[1], 3)))
    order = make_order(kind, pp, m, virtual)
    seconds = st.floats(0, 10, allow_nan=False) | st.just(0.0)
    cuts = [[{name: data.draw(seconds) for name in PARTS} for _ in range(pp * virtual)] for _ in range(3)]
    together = [
        StageOfMany(*(np.array([cut[stage][name] for cut in cuts]) for name in PARTS)) for stage in range(pp * virtual)
    ]
    alone = [play(order, [StageSeconds(**stage) for stage in cut], transfers).step_seconds for cut in cuts]
    assert steps_of_many(order, together, transfers) == pytest.approx(alone)


@quick
@given(
    graphs,
    clusters,
    st.sampled_from([("1f1b", 2, 1), ("zb", 2, 1), ("interleaved", 2, 2), ("zbv", 2, 2)]),
    st.integers(0, 3),
)
def test_every_cut_comes_once_and_no_cut_is_faster_than_its_bound(
    graph: Graph, cluster: Cluster, turns: tuple[ScheduleKind, int, int], zero: int
) -> None:
    schedule, pp, virtual = turns
    problem = Problem(graph, cluster, PlanRequest(global_batch=4))
    units = len(problem.units)
    if cluster.num_devices < 2 * pp or units < pp * virtual or not can_rank(units, pp * virtual):
        return
    drafts = Drafts(problem)
    point = Point(Shape(pp, 2, 1, 1, 1, False, 1, 2, False), schedule, virtual, zero)  # type: ignore[arg-type]
    bounds, room = drafts.bounds(point), drafts.room(point)
    assert bounds is not None
    assert room is not None
    ranked, taken, last = RankedCuts(bounds, room), [], 0.0
    while ranked.least_seconds < float("inf"):
        found = ranked.step(float("inf"), must_fit=False)
        if found is None:
            continue
        cut, seconds = found
        assert seconds >= last
        taken, last = [*taken, cut], seconds
        plan = drafts.plan(point, cut)
        costed = problem.cost(plan) if plan is not None and drafts.runs(point) else None
        if costed is not None and costed.fits:
            assert seconds <= costed.step_seconds * (1 + 1e-9)
    assert sorted(taken) == sorted(every_cut(units, pp * virtual))
    assert len(taken) == num_cuts(units, pp * virtual)
