"""Memory by category against what others say: the profiler's own sum, and the cost model's peak of every pipeline stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from cases import Case, graph_of, hand_cluster, plan_of, source_of
from pool import RankPool, this_rank
from test_collectives_and_memory import BROAD, MEASURED_WITHIN, RECIPES

from meshwright.core.plan import Plan, ScheduleKind
from meshwright.core.request import PlanRequest
from meshwright.core.run.trace import Trace
from meshwright.cost.estimate import Estimator
from meshwright.measure import profile
from meshwright.measure.record import StepRecorder
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.watch import SAMPLED_STEP

Pools = Callable[[int], RankPool]


def run_on_rank(model: str, plan: Plan) -> Trace:
    """Up to the sampled step, and one more."""
    optimizer, _ = RECIPES["adam"]
    source = source_of(model)
    program = apply(
        source.build(), plan, optimizer=optimizer, objective=source.objective, max_norm=1.0, recorder=StepRecorder(),
        device=this_rank().device,
    )  # fmt: skip
    assert source.example is not None
    for _ in range(SAMPLED_STEP + 2):
        program.step(source.example(plan.global_batch))
    return program.trace()


@dataclass(frozen=True)
class Summed:
    """The most a step took above what was held before it, by both accounts."""

    by_category: int
    by_profiler: int


def summed_on_rank(case: Case) -> Summed:
    texts = []
    read = profile.parse
    profile.parse = lambda text, device_type: texts.append(text) or read(text, device_type)  # type: ignore[func-returns-value]
    try:
        trace = run_on_rank(case.model, plan_of(case))
    finally:
        profile.parse = read
    points = [point.memory_bytes.total for point in trace.memory_over_time]
    events = json.loads(texts[-1].decode("utf-8", errors="replace"))["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    totals = [change["Total Allocated"] for change in sorted(changes, key=lambda change: change["Ev Idx"])]
    first = totals[0] - changes[0]["Bytes"]
    return Summed(max(points) - points[0], max(totals) - first)


@pytest.mark.parametrize(("zero", "recompute", "microbatches"), [(0, "none", 1), (0, "full", 4), (3, "full", 2)])
def test_categories_add_up_to_the_profilers_sum(pool: Pools, zero: int, recompute: str, microbatches: int) -> None:
    """One rank: nothing dies in threads that the profiler does not see."""
    (summed,) = pool(1).run(summed_on_rank, Case(BROAD, zero, recompute, microbatches, "fp32", samples=8))
    assert summed.by_category == pytest.approx(summed.by_profiler, rel=0.01)


DEEP = "gpt:layers=8,hidden=64,heads=4,seq=128,vocab=256"


@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 6), ("1f1b", 2), ("1f1b", 6)])
def test_peak_of_every_stage(pool: Pools, schedule: ScheduleKind, microbatches: int) -> None:
    """With GPipe, and a pipeline that is no more than filled, activations are fullest before gradients are there."""
    graph, cluster = graph_of(DEEP), hand_cluster(2)
    request = PlanRequest(pp=2, schedule=schedule, microbatch=2, global_batch=2 * microbatches)
    plan = plain_plan(request, graph, 2, "")
    estimator = Estimator(graph, plan, cluster, RECIPES["adam"][1])
    moments = estimator.memory.peaks(estimator.memory_order, cluster.device)
    for coordinate, trace in enumerate(pool(2).run(run_on_rank, DEEP, plan)):
        assert trace.memory_bytes is not None
        predicted, measured = moments[coordinate].memory, trace.memory_bytes
        assert predicted.total == pytest.approx(measured.total, rel=0.05), (coordinate, predicted, measured)
        assert abs(predicted.gradients - measured.gradients) <= MEASURED_WITHIN * measured.total, (predicted, measured)
