"""Losses of distributions and of CTC are followed on tensors without values, and at parity with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import ASSETS
from pool import RankPool, this_rank
from torch.distributions import Distribution

from meshwright.capturing.capture import capture_source
from meshwright.core.errors import CaptureError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small
from meshwright.runtime._torch import checks_distributions

PLANS: dict[str, dict[str, Any]] = {"zero": {"zero": 3}, "tp": {"tp": 2}, "pp": {"pp": 2}}


def named(model: str) -> str:
    return f"{ASSETS}/distributions.py:{model}"


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    return compare(resolve(model).small(), plan, 2, this_rank())


@pytest.mark.parametrize("model", ["policy", "latent"])
def test_arguments_are_not_looked_at_when_a_model_is_followed(model: str) -> None:
    checked = checks_distributions()
    graph = capture_source(resolve(named(model)).small())
    assert (len(graph.repeated_blocks), graph.guesses) == (4, ())
    assert graph.flow is not None
    assert Distribution._validate_args == checked


@pytest.mark.filterwarnings("ignore::meshwright.core.errors.GuessWarning")
@pytest.mark.parametrize(
    ("model", "plan"),
    [*(("policy", plan) for plan in PLANS), ("latent", "pp"), ("speech", "zero"), ("speech", "tp")],
)
def test_parity(pool: Callable[[int], RankPool], model: str, plan: str) -> None:
    made = plain_plan_of_small(named(model), PlanRequest(**PLANS[plan]), 2)
    for result in pool(2).run(compare_on_rank, named(model), made):
        assert result.ok, result.first_difference


@pytest.mark.filterwarnings("ignore::meshwright.core.errors.GuessWarning")
def test_targets_of_ctc_are_as_long_as_there_is_room_for() -> None:
    (guess,) = capture_source(resolve(named("speech")).small()).guesses
    assert (guess.question, guess.answer) == ("how long the targets of a CTC loss are", "5")


def test_packed_sequences_are_refused_with_what_to_do() -> None:
    with pytest.raises(CaptureError, match=r"distributions\.py:\d+.*give the LSTM or GRU the padded tensor itself"):
        capture_source(resolve(named("packed")).small())
