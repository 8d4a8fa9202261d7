"""Models as people write them elsewhere: at parity with one process, or refused by name, under every axis."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from cases import ASSETS
from pool import RankError, RankPool, this_rank

from meshwright.core.errors import GuessWarning, MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small
from meshwright.runtime.split import exchange

pytestmark = pytest.mark.filterwarnings("ignore::meshwright.core.errors.GuessWarning")
Pools = Callable[[int], RankPool]
FILE = f"{ASSETS}/own_backward.py"

PLANS = {
    "tp": PlanRequest(tp=2),
    "tokens": PlanRequest(tp=2, sequence_parallel=True),
    "cp": PlanRequest(cp=2),
    "ring": PlanRequest(cp=2, context="ring"),
    "pp": PlanRequest(pp=2),
    "zero1": PlanRequest(zero=1),
    "zero3": PlanRequest(zero=3),
}
FUNCTIONS = ["after_down", "in_the_middle", "straight_through", "reversed_gradient", "norm_by_hand"]
AT_PARITY = [
    *((name, plan) for name in FUNCTIONS for plan in ("tp", "tokens", "cp")),
    ("after_down", "ring"), ("after_down", "pp"), ("after_down", "zero3"),
    ("unit_gradients", "tp"), ("unit_gradients", "cp"), ("unit_gradients", "pp"),
    *(("scaling_hook", plan) for plan in ("tp", "cp", "pp", "zero3")),
    ("row_norm_hook", "tp"), ("row_norm_hook", "tokens"), ("row_norm_hook", "cp"), ("module_hook", "tp"),
    ("scripted", "tp"), ("scripted", "tokens"), ("scripted", "cp"),
    *((name, plan) for name in ("changed_in_place", "changed_in_the_middle") for plan in ("tp", "tokens", "cp")),
    ("physics", "tp"), ("gradient_penalty", "tp"), ("gradient_penalty", "cp"),
    ("node_hook", "tp"), ("node_hook", "zero3"), ("compiled_part", "tp"), ("compiled_part", "zero3"),
    ("complex_weights", "tp"), ("complex_weights", "pp"), ("truth_values", "zero3"), ("needs_labels", "tp"),
    ("loss_of_a_variable", "tp"), ("hook_in_forward", "tp"), ("block_backward_hook", "tp"),
    ("following_average", "zero3"), ("frozen_below", "zero3"),
    *((name, plan) for name in ("own_checkpoints", "reentrant_checkpoints") for plan in ("tp", "cp", "pp", "zero3")),
]  # fmt: skip
REFUSED = [
    ("parameter_hook", "tp", "head.weight"), ("parameter_hook", "cp", "head.weight"),
    ("parameter_hook", "pp", "head.weight"), ("parameter_hook", "zero3", "own_backward.py, line"),
    ("module_hook", "cp", "backward hook"), ("node_hook", "cp", "grad_fn.register_hook"),
    ("loss_of_a_variable", "pp", "the loss reads a tensor"), ("hook_in_forward", "pp", "a forward hook of block 'blocks.0'"),
    ("block_backward_hook", "pp", "a full backward hook of block 'blocks.0'"),
]  # fmt: skip


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    torch.set_num_threads(1)
    return compare(resolve(model).small(), plan, 2, this_rank())


@pytest.mark.parametrize(("name", "plan"), AT_PARITY)
def test_it_is_at_parity(pool: Pools, name: str, plan: str) -> None:
    model = f"{FILE}:{name}"
    for result in pool(2).run(compare_on_rank, model, plain_plan_of_small(model, PLANS[plan], 2)):
        assert result.ok, result.first_difference


@pytest.mark.parametrize(("name", "plan", "words"), REFUSED)
def test_it_is_refused_by_name(name: str, plan: str, words: str) -> None:
    with pytest.raises(MeshwrightError, match=re.escape(words)):
        plain_plan_of_small(f"{FILE}:{name}", PLANS[plan], 2)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_second_derivatives_are_refused_where_parameters_are_forgotten(pool: Pools, plan: str) -> None:
    """The backward inside a forward lets go of gathered parameters that the second derivative asks for."""
    model = f"{FILE}:physics"
    with pytest.raises(
        RankError, match=r"ModelError: the forward takes a gradient through block '.*' with create_graph=True"
    ):
        pool(2).run(compare_on_rank, model, plain_plan_of_small(model, PLANS[plan], 2))


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("written_gradient", "tp", r"writes the gradient of parameter 'blocks.0.mlp.up.weight'.*'Accumulating'"),
        ("frozen_below", "pp", r"pp coordinate 0 .* hold no parameter that is trained"),
        ("complex_weights", "zero3", "parameter 'blocks.0.mlp.turn' is complex"),
    ],
)
def test_ranks_refuse_it_by_name(pool: Pools, name: str, plan: str, words: str) -> None:
    model = f"{FILE}:{name}"
    with pytest.raises(RankError, match=f"PlanError: .*{words}"):
        pool(2).run(compare_on_rank, model, plain_plan_of_small(model, PLANS[plan], 2))


def test_blocks_inside_a_function_are_not_cut(pool: Pools) -> None:
    """Gradients of what comes before them were missing."""
    model = f"{FILE}:redone"
    said = r"cannot be cut at block 'blocks.0': the function 'Redone' \(own_backward.py, line \d+\) calls it"
    with pytest.raises((RankError, MeshwrightError), match=said):
        pool(2).run(compare_on_rank, model, plain_plan_of_small(model, PLANS["pp"], 2))


NOT_OF_PARTS = [
    ("unit_gradient_of_all", "tp", "WholeNorm"), ("unit_gradients", "zero3", "RowNorm"),
    ("clipping_hook", "pp", "hook"), ("clipping_hook", "cp", "own_backward.py, line"), ("row_norm_hook", "zero3", "hook"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "words"), NOT_OF_PARTS)
def test_a_backward_that_sees_the_whole_batch_is_refused_where_it_is_cut(
    pool: Pools, name: str, plan: str, words: str
) -> None:
    model = f"{FILE}:{name}"
    with pytest.raises(RankError, match=f"PlanError: the gradient of a batch (?s:.)*{words}"):
        pool(2).run(compare_on_rank, model, plain_plan_of_small(model, PLANS[plan], 2))


@pytest.mark.parametrize("name", ["unit_gradient_of_all", "clipping_hook"])
def test_and_runs_where_it_is_not(pool: Pools, name: str) -> None:
    model = f"{FILE}:{name}"
    for result in pool(2).run(compare_on_rank, model, plain_plan_of_small(model, PlanRequest(tp=2, microbatch=4), 2)):
        assert result.ok, result.first_difference


def without_own_scale(plan: Plan) -> ParityResult:
    """Along cp a backward by hand then sees as many times the gradient as there are ranks."""
    kept, exchange.gradient_scale = exchange.gradient_scale, lambda ranks: 1.0
    try:
        return compare_on_rank(f"{FILE}:unit_gradients", plan)
    finally:
        exchange.gradient_scale = kept


def test_an_error_that_is_planted_is_found(pool: Pools) -> None:
    plan = plain_plan_of_small(f"{FILE}:unit_gradients", PLANS["cp"], 2)
    assert not any(result.ok for result in pool(2).run(without_own_scale, plan))


def test_the_plan_redoes_what_the_model_would() -> None:
    with pytest.warns(GuessWarning, match="own activation checkpointing"):
        plan = plain_plan_of_small(f"{FILE}:own_checkpoints", PlanRequest(), 1)
    assert set(plan.recomputed("full")) == {"blocks.0", "blocks.1"}
    with pytest.warns(GuessWarning):
        assert not plain_plan_of_small(f"{FILE}:own_checkpoints", PlanRequest(recompute="none"), 1).recompute
