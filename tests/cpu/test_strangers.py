"""Models as people write them are followed, planned and at parity with one process; none is left other than it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import ASSETS
from pool import RankPool, this_rank

from meshwright.capture.capture import capture_source
from meshwright.cli.shrunk import plain_plan_of_small
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.objective import call
from meshwright.models.source import resolve
from meshwright.runtime._torch import FakeTensor

AXES: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "cp": {"cp": 2}, "zero": {"zero": 3}}
FOLLOWED = [
    "function", "own_device", "reads", "lists", "cached_attribute", "cached_dict", "cached_buffer", "cached_global",
    "cached_function",
]  # fmt: skip


def named(stranger: str) -> str:
    return f"{ASSETS}/strangers.py:{stranger}"


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    return compare(resolve(model).small(), plan, 2, this_rank())


def run_alike(pool: Callable[[int], RankPool], model: str, axes: dict[str, Any]) -> Plan:
    plan = plain_plan_of_small(model, PlanRequest(**axes), 2)
    for result in pool(2).run(compare_on_rank, model, plan):
        assert result.ok, result.first_difference
    return plan


@pytest.mark.parametrize("stranger", FOLLOWED)
def test_a_model_is_followed_and_left_as_it_was(stranger: str) -> None:
    source = resolve(named(stranger))
    assert source.example is not None
    graph = capture_source(source, "fp64")
    assert graph.identity == capture_source(source, "fp64").identity
    assert graph.flow is not None
    assert len(graph.repeated_blocks) == 4
    module = source.build()
    assert not isinstance(call(module, source.example(2)), FakeTensor)


@pytest.mark.parametrize("stranger", ["function", "own_device", "cached_dict", "cached_global"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_parity(pool: Callable[[int], RankPool], stranger: str, axes: dict[str, Any]) -> None:
    plan = run_alike(pool, named(stranger), axes)
    if plan.mesh.tp > 1:
        assert any("tp" in tensor.dims for rule in plan.sharding for tensor in rule.tensors)
