"""Batch norm over all dp ranks: the statistics, gradients and running averages of one process with all samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import ROOT, Case, graph_of, plan_of, source_of
from pool import RankError, RankPool, this_rank
from test_collectives_and_memory import check_collectives_and_state
from test_parity import compare_on_rank, scale_one_gradient
from torch import Tensor, nn

import meshwright as mw
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply

Pools = Callable[[int], RankPool]

SYNCED = Case("resnet", 0, "none", 2, sync_batch_norm=True)


@pytest.mark.parametrize(
    "case", [SYNCED, replace(SYNCED, zero=3), replace(SYNCED, zero=1, num_microbatches=1)], ids=str
)
def test_two_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    for result in pool(2).run(compare_on_rank, case, 2):
        assert result.first_difference is None
        assert result.max_loss_difference < 1e-12
        assert result.max_gradient_difference < 1e-10


def test_a_scaled_gradient_is_found(pool: Pools) -> None:
    for result in pool(2).run(compare_on_rank, SYNCED, 1, scale_one_gradient):
        assert not result.ok


def compare_with_other_groups(case: Case) -> bool:
    """The reference told that batch norms are not synchronised."""
    from unittest import mock

    from meshwright.measure import parity

    groups = parity._groups
    alone = lambda batch, plan: groups(batch, plan_of(replace(case, sync_batch_norm=False)))  # noqa: E731
    with mock.patch.object(parity, "_groups", alone):
        return compare_on_rank(case, 1).ok


def test_statistics_of_each_rank_alone_are_found(pool: Pools) -> None:
    assert pool(2).run(compare_with_other_groups, SYNCED) == [False, False]


@pytest.mark.parametrize(("zero", "recompute"), [(0, "none"), (3, "none"), (2, "full")])
def test_collectives_and_state(pool: Pools, zero: int, recompute: str) -> None:
    case = Case("resnet", zero, recompute, 2, "fp32", sync_batch_norm=True)
    check_collectives_and_state(pool(2), case)


def buffers_on_rank(case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    source, plan = source_of(case.model), plan_of(case)
    program = apply(
        source.build(), plan, optimizer=torch.optim.SGD, objective=source.objective, device=this_rank().device
    )
    torch.manual_seed(1)
    batch = source.example(plan.global_batch)  # type: ignore[misc]
    program.step(batch)
    return {name: buffer.clone() for name, buffer in program.module.named_buffers()}


def test_running_statistics_are_those_of_one_process(pool: Pools) -> None:
    case = Case("resnet", 0, "none", 1, "fp64", sync_batch_norm=True)
    one, other = pool(2).run(buffers_on_rank, case)
    (whole,) = pool(1).run(buffers_on_rank, replace(case, samples=8))
    for name, buffer in whole.items():
        torch.testing.assert_close(one[name], buffer)
        torch.testing.assert_close(other[name], buffer)


class Synced(nn.Module):
    """A model whose author wrote SyncBatchNorm, as scripts for DistributedDataParallel do."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)]
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(nn.SyncBatchNorm.convert_sync_batchnorm(block) for block in blocks)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def synced_losses(asked: dict[str, Any], num_ranks: int) -> list[float]:
    torch.manual_seed(0)
    model = Synced().double()
    batch = {"image": torch.randn(4, 3, 8, 8).double(), "labels": torch.arange(4)}
    graph = mw.capture(model, batch, precision="fp64")
    request = PlanRequest(**{"global_batch": 4, "precision": "fp64", "microbatch": 4, **asked})
    plan = plain_plan(request, graph, num_ranks, "tests")
    program = apply(model, plan, optimizer=torch.optim.SGD, device=this_rank().device)
    return [float(program.step(batch).loss) for _ in range(3)]


@pytest.mark.parametrize(
    "asked",
    [{"sync_batch_norm": True, "microbatch": 2}, {"sync_batch_norm": True, "microbatch": 2, "zero": 3}, {"pp": 2}],
)
def test_a_users_own_synchronised_norms(pool: Pools, asked: dict[str, Any]) -> None:
    expected = pool(1).run(synced_losses, {}, 1)[0]
    for found in pool(2).run(synced_losses, asked, 2):
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_users_own_synchronised_norms_are_refused_where_the_plan_has_none(pool: Pools) -> None:
    with pytest.raises(RankError, match=r"'blocks.0.1' is a SyncBatchNorm.*--sync-batch-norm"):
        pool(2).run(synced_losses, {"microbatch": 2}, 2)


def compare_over_tp(case: Case) -> ParityResult:
    source = source_of(case.model)
    request = PlanRequest(tp=2, global_batch=4, microbatch=2, precision="fp64", sync_batch_norm=True)
    plan = plain_plan(request, graph_of(case.model), 4, "tests")
    return compare(source, try_sharding(plan, source), 2, this_rank())


def test_channels_over_tp(pool: Pools) -> None:
    for result in pool(4).run(compare_over_tp, SYNCED):
        assert result.first_difference is None


def compare_small(model: str, plan: Plan) -> ParityResult:
    return compare(resolve(model).small(), plan, 2, this_rank())


def test_statistics_of_channels_over_tp_that_a_whole_norm_keeps(pool: Pools) -> None:
    """A norm that is not split reads what a split one handed on: each rank follows its own channels, and all get all."""
    model = f"hf:{ROOT}/tests/survey/vision/swiftformer.json"
    for result in pool(2).run(compare_small, model, plain_plan_of_small(model, PlanRequest(tp=2), 2)):
        assert result.ok, result.first_difference
