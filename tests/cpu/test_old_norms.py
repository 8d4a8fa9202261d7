"""Weights that a hook computes before every forward: neither parameters nor buffers, and every plan must live with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cases import ROOT
from pool import RankPool, this_rank
from torch import nn

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.old_norms import without_computed_weights
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small

Pools = Callable[[int], RankPool]
FILE = ROOT / "tests/survey/habits/state.py"
PLANS = [PlanRequest(tp=2), PlanRequest(cp=2), PlanRequest(pp=2), PlanRequest(zero=3)]


def compare_on_rank(model: str, plan: Plan) -> ParityResult:
    torch.set_num_threads(1)
    return compare(resolve(model).small(), plan, 2, this_rank())


@pytest.mark.parametrize("request_", PLANS, ids=["tp", "cp", "pp", "zero3"])
@pytest.mark.parametrize("name", ["weight_norm_old", "spectral_norm_old"])
def test_it_is_at_parity(pool: Pools, name: str, request_: PlanRequest) -> None:
    model = f"{FILE}:{name}"
    for result in pool(2).run(compare_on_rank, model, plain_plan_of_small(model, request_, 2)):
        assert result.ok, result.first_difference


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_without_computed_weights_can_be_copied() -> None:
    module = nn.utils.weight_norm(nn.Linear(3, 3))
    x = torch.rand(2, 3)
    expected = module(x)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(module)
    assert torch.equal(copy.deepcopy(without_computed_weights(module))(x), expected)
