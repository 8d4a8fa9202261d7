"""What a model raises under a plan, and in one process does not, is an error with its module and line: no refusal."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from cases import ASSETS
from command import Cli
from pool import RankError, RankPool, this_rank

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small

MODEL = f"{ASSETS}/strangers.py:counting"
SAID = r"under pp 2 .* the model \(Counting\) raises LookupError: block \d is empty .*strangers\.py:\d+"


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    return compare(resolve(model).small(), plan, 1, this_rank())


def test_it_is_no_refusal(pool: Callable[[int], RankPool]) -> None:
    plan = plain_plan_of_small(MODEL, PlanRequest(pp=2), 2)
    with pytest.raises(RankError) as raised:
        pool(2).run(compare_on_rank, MODEL, plan)
    assert any(re.match(f"FailsUnderPlanError: .*{SAID}", error) for error in raised.value.errors.values())


def test_the_command_says_so(cli: Cli) -> None:
    ended = cli("parity", MODEL, "--nproc", 2, "--pp", 2, "--steps", 1, "--device", "cpu")
    assert ended.code == 1
    assert re.search(SAID, ended.err)
    assert "Traceback" not in ended.err
