"""Several stages a coordinate, the head as long as many blocks: the cut that is found beside the best of all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machines import machine
from transformer import transformer_graph

from meshwright.core.errors import PlanError
from meshwright.core.request import PlanRequest
from meshwright.rules.stages import cut_stages
from meshwright.searching.problem import Problem
from meshwright.searching.search import search
from meshwright.searching.units import every_cut, sizes_of

LITTLE = 1.01


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual", "layers"),
    [("zbv", 2, 2, 8), ("zbv", 2, 2, 12), ("interleaved", 2, 2, 12), ("interleaved", 2, 3, 9), ("zbv", 2, 2, 16)],
)
@pytest.mark.parametrize("blocks_in_head", [1, 4, 10])
def test_no_cut_is_much_faster_than_the_one_that_is_found(
    schedule: Any, pp: int, virtual: int, layers: int, blocks_in_head: int
) -> None:
    graph = transformer_graph(layers=layers, hidden=32, vocab=32 * 12 * blocks_in_head, seq=32)
    cluster = machine(pp, latency_seconds=1e-9, bytes_per_second=1e15)
    fixed = PlanRequest(global_batch=8, microbatch=1, pp=pp, dp=1, tp=1, cp=1, schedule=schedule, virtual=virtual)
    found = search(graph, cluster, fixed, prefer_fastest=True)
    problem = Problem(graph, cluster, fixed)
    best = min(_seconds(problem, found.plan, sizes_of(cut)) for cut in every_cut(layers + 2, pp * virtual))
    assert found.estimate.step_seconds <= LITTLE * best
    assert found.claim.gap is not None
    assert found.estimate.step_seconds <= (1 + found.claim.gap) * best * (1 + 1e-9), "the gap is true"
    assert not found.claim.complete or found.estimate.step_seconds <= best * (1 + 1e-9)


def _seconds(problem: Problem, plan: Any, sizes: list[int]) -> float:
    stages = cut_stages(problem.units.blocks, sizes, plan.mesh.pp, plan.schedule)
    try:
        return problem.cost(msgspec.structs.replace(plan, stages=stages)).step_seconds
    except PlanError:
        return float("inf")
