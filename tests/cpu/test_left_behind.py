"""What a forward leaves behind beside its result: right under every plan, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import ASSETS, graph_of, source_of
from pool import RankError, RankPool, this_rank

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.rules.plain_plan import plain_plan

Pools = Callable[[int], RankPool]
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "zero1": (2, {"zero": 1}),
    "zero2": (2, {"zero": 2, "recompute": "full"}),
    "zero3": (2, {"zero": 3}),
    "zero1 offload": (2, {"zero": 1, "offload": "optimizer"}),
    "tp2 offload": (2, {"tp": 2, "offload": "optimizer"}),
    "recompute": (2, {"recompute": "full"}),
    "pp2": (2, {"pp": 2, "microbatch": 2}),
    "pp2 interleaved": (2, {"pp": 2, "microbatch": 2, "virtual": 2, "schedule": "interleaved"}),
    "pp2 x zero3": (4, {"pp": 2, "dp": 2, "zero": 3, "microbatch": 2}),
    "pp2 x tp2": (4, {"pp": 2, "tp": 2, "microbatch": 2}),
    "streamed": (1, {"offload": "parameters", "recompute": "full"}),
    "streamed x dp2": (2, {"offload": "parameters", "recompute": "full", "zero": 3}),
    "offload": (1, {"offload": "optimizer"}),
    "offload x zero3": (2, {"offload": "optimizer", "zero": 3}),
    "pp2 x dp2": (4, {"pp": 2, "dp": 2, "microbatch": 2, "recompute": "full"}),
}
"""Ranks and what is asked for."""


def plan_of(model: str, plan: str) -> Plan:
    num_ranks, asked = PLANS[plan]
    request = PlanRequest(**{"precision": "fp64", "global_batch": 8, "microbatch": 2, **asked})
    return plain_plan(request, graph_of(f"{ASSETS}/left_behind.py:{model}"), num_ranks, "tests")


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    return compare(source_of(f"{ASSETS}/left_behind.py:{model}"), plan, 3, this_rank())


@pytest.mark.parametrize(
    "plan",
    ["dp2", "zero3", "recompute", "pp2", "pp2 interleaved", "pp2 x dp2", "streamed", "streamed x dp2", "offload"],
)
@pytest.mark.parametrize("model", ["counting", "averaging", "spectral"])
def test_buffers_and_counters(pool: Pools, model: str, plan: str) -> None:
    for result in pool(PLANS[plan][0]).run(compare_on_rank, model, plan_of(model, plan)):
        assert result.ok, result.first_difference


ATTRIBUTES = ("auxiliary", "appending")


@pytest.mark.parametrize("plan", ["recompute", "zero3", "pp2 interleaved", "pp2 x zero3"])
@pytest.mark.parametrize("model", ATTRIBUTES)
def test_attributes_and_lists(pool: Pools, model: str, plan: str) -> None:
    for result in pool(PLANS[plan][0]).run(compare_on_rank, model, plan_of(model, plan)):
        assert result.ok, result.first_difference


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("hiding", ("stack", "global variable")),
        ("hooked", ("blocks.0", "left_behind.py", "hook")),
        ("outside", ("writes parameter 'teacher.0.norm.weight'", "mul_", "set pp to 1")),
        ("boxed", ("block 'blocks.1'", "another block made", "global variable")),
    ],
)
def test_what_stages_cannot_hand_on_is_refused(pool: Pools, model: str, words: tuple[str, ...]) -> None:
    with pytest.raises(RankError) as raised:
        pool(2).run(compare_on_rank, model, plan_of(model, "pp2"))
    for error in raised.value.errors.values():
        assert error.startswith("PlanError")
        assert all(word in error for word in words)


@pytest.mark.parametrize("plan", ["streamed", "streamed x dp2"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        *((model, ("'blocks.0'", "does not return")) for model in (*ATTRIBUTES, "hiding", "hooked", "boxed")),
        ("penalised", ("'blocks.0.norm.weight'", "outside of its block")),
        ("teaching", ("outside of its block", "on the host")),
        ("outside", ("outside of its block", "on the host")),
    ],
)
def test_what_streamed_blocks_cannot_hand_on_is_refused(
    pool: Pools, model: str, words: tuple[str, ...], plan: str
) -> None:
    with pytest.raises(RankError) as raised:
        pool(PLANS[plan][0]).run(compare_on_rank, model, plan_of(model, plan))
    for error in raised.value.errors.values():
        assert error.startswith("ModelError")
        assert all(word in error for word in words)


@pytest.mark.parametrize("plan", ["dp2", "zero1", "zero2", "zero3"])
def test_parameters_that_a_forward_writes(pool: Pools, plan: str) -> None:
    for result in pool(2).run(compare_on_rank, "teaching", plan_of("teaching", plan)):
        assert result.ok, result.first_difference


@pytest.mark.parametrize(
    "plan",
    ["zero1", "zero2", "zero3", "zero1 offload", "tp2 offload", "pp2 x zero3", "streamed x dp2", "offload x zero3"],
)
def test_parameters_without_a_dim(pool: Pools, plan: str) -> None:
    for result in pool(PLANS[plan][0]).run(compare_on_rank, "gated", plan_of("gated", plan)):
        assert result.ok, result.first_difference


@pytest.mark.filterwarnings("ignore::meshwright.core.errors.GuessWarning")
@pytest.mark.parametrize("plan", ["dp2", "zero3"])
def test_parameters_that_ranks_write_otherwise_are_refused(pool: Pools, plan: str) -> None:
    with pytest.raises(RankError) as raised:
        pool(2).run(compare_on_rank, "first_batch", plan_of("first_batch", plan))
    assert all("ModelError" in error and "first.shift" in error for error in raised.value.errors.values())


@pytest.mark.parametrize("plan", ["pp2", "pp2 x zero3", "streamed", "streamed x dp2"])
def test_parts_that_blocks_of_several_stages_share(pool: Pools, plan: str) -> None:
    for result in pool(PLANS[plan][0]).run(compare_on_rank, "sharing", plan_of("sharing", plan)):
        assert result.ok, result.first_difference


@pytest.mark.parametrize("plan", ["dp2", "recompute", "pp2", "pp2 interleaved", "pp2 x tp2"])
def test_weights_that_are_read_outside_their_blocks(pool: Pools, plan: str) -> None:
    for result in pool(PLANS[plan][0]).run(compare_on_rank, "penalised", plan_of("penalised", plan)):
        assert result.ok, result.first_difference


@pytest.mark.parametrize("plan", ["zero3", "pp2 x zero3"])
def test_weights_in_shards_are_not(pool: Pools, plan: str) -> None:
    with pytest.raises(RankError, match=r"ModelError: parameter 'blocks.0.norm.weight' is read.* outside of its block"):
        pool(PLANS[plan][0]).run(compare_on_rank, "penalised", plan_of("penalised", plan))
