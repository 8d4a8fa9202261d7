"""A forecast is the estimate, moment by moment: the same step, the same peaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import chain_graph, named_machine, plan_for
from strategies import quick

from meshwright.core.estimate import MemoryParts
from meshwright.core.plan import ScheduleKind
from meshwright.core.run.trace import MemoryPoint
from meshwright.cost.estimate import estimate
from meshwright.cost.forecast import MOST_ACTIONS, forecast
from meshwright.rules.downsampling import downsampled

GRAPH = chain_graph(8)


@pytest.mark.parametrize(
    "request_",
    [
        {"microbatch": 4, "global_batch": 4},
        {"microbatch": 1, "global_batch": 8},
        {"dp": 2, "microbatch": 1, "global_batch": 8},
        {"dp": 2, "zero": 3, "microbatch": 2, "global_batch": 4},
        {"dp": 4, "zero": 2, "microbatch": 1, "global_batch": 16},
        {"pp": 4, "microbatch": 1, "global_batch": 8},
        {"pp": 2, "dp": 2, "microbatch": 1, "global_batch": 8},
        {"pp": 2, "microbatch": 1, "global_batch": 8, "schedule": "gpipe"},
        {"pp": 4, "dp": 2, "zero": 1, "microbatch": 1, "global_batch": 16, "schedule": "gpipe"},
        {"pp": 4, "microbatch": 1, "global_batch": 4},
        {"pp": 2, "virtual": 2, "microbatch": 1, "global_batch": 4, "schedule": "interleaved"},
        {"pp": 2, "microbatch": 1, "global_batch": 8, "schedule": "zb"},
        {"microbatch": 1, "global_batch": 4, "offload": "optimizer"},
        {"dp": 2, "zero": 2, "microbatch": 1, "global_batch": 4, "offload": "optimizer"},
        {"pp": 2, "microbatch": 1, "global_batch": 4, "offload": "optimizer"},
        {"microbatch": 1, "global_batch": 4, "offload": "parameters", "recompute": "full"},
    ],
    ids=str,
)
def test_step_and_peak_are_those_of_the_estimate(request_: dict[str, object]) -> None:
    plan, cluster = plan_for(GRAPH, **request_), named_machine(8, 1)
    promised, planned = estimate(GRAPH, plan, cluster), forecast(GRAPH, plan, cluster)
    assert planned.step_seconds == pytest.approx(promised.step_seconds)
    peaks = [max(point.memory_bytes.total for point in curve) for curve in planned.memory_over_time]
    assert max(peaks) == promised.peak_bytes
    assert peaks.index(max(peaks)) == promised.worst_rank * plan.mesh.pp // plan.world


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb"])
def test_work_is_whole_and_in_order(kind: ScheduleKind) -> None:
    plan = plan_for(GRAPH, pp=4, microbatch=1, global_batch=8, schedule=kind)
    planned = forecast(GRAPH, plan, named_machine(8, 1))
    for row in planned.work:
        assert [one.kind for one in row].count("forward") == 8
        assert row[-1].kind == "update"
        assert all(one.end_seconds <= other.start_seconds + 1e-12 for one, other in pairwise(row))
        assert row[-1].end_seconds <= planned.step_seconds + 1e-12


def test_gradients_are_none_before_the_first_backward_and_whole_after_the_last() -> None:
    plan = plan_for(GRAPH, microbatch=1, global_batch=4)
    (curve,) = forecast(GRAPH, plan, named_machine(8, 1)).memory_over_time
    whole = GRAPH.num_parameters * 4
    assert curve[0].memory_bytes.gradients == 0
    assert curve[1].memory_bytes.gradients == 0
    assert max(point.memory_bytes.gradients for point in curve) == whole
    assert curve[-2].memory_bytes.gradients == whole
    assert curve[-1].memory_bytes.gradients == 0


def test_a_long_step_is_shown_shorter_and_says_so() -> None:
    plan = plan_for(GRAPH, pp=8, microbatch=1, global_batch=MOST_ACTIONS)
    planned = forecast(GRAPH, plan, named_machine(8, 1))
    assert planned.num_microbatches < plan.num_microbatches
    assert sum(len(row) for row in planned.work) <= MOST_ACTIONS + 8
    assert planned.from_json(planned.to_json()) == planned


@quick
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_and_its_peak(sizes: list[int], most: int) -> None:
    points = [
        MemoryPoint(at_seconds=float(number), memory_bytes=MemoryParts(temporaries=size))
        for number, size in enumerate(sizes)
    ]
    kept = downsampled(points, most)
    assert len(kept) <= max(most, 4)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    for extreme in (max, min):
        found = extreme(point.memory_bytes.total for point in kept)
        assert found == extreme(sizes)
