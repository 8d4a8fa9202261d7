"""A loss that is not the mean of its parts' is found, and refused for plans that cut the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from cases import ASSETS, Case, hand_cluster, plan_of
from pool import RankPool, this_rank
from rich.console import Console
from torch import Tensor, nn

from meshwright.capturing.capture import capture_source
from meshwright.core.errors import ModelError, PlanError
from meshwright.core.request import PlanRequest
from meshwright.jobs.layout import lay_out_on
from meshwright.measure.mean_loss import check_mean_loss, depends_on_batch, find_whole_batch_loss
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.objective import DEFAULT, Batch, Objective
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.training.lock import RunLock
from meshwright.training.settings import Settings

Pools = Callable[[int], RankPool]

WIDTH = 8


class Model(nn.Module):
    def __init__(self, extra: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.extra = extra()
        self.head = nn.Linear(WIDTH, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1  # a state that forward changes is no difference between parts
        return self.head(self.extra(F.dropout(self.embedding(ids), 0.3)) + self.seen)  # type: ignore[no-any-return]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT  # type: ignore[no-any-return]


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Balanced(Centred):
    depends_on_batch = True


def batch(samples: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(16, (samples, 7), generator=torch.Generator().manual_seed(0))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def tokens(output: Tensor, batch: Any, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), **options)


def contrast(output: Tensor, batch: Any) -> Tensor:
    first, second = (F.normalize(output[:, place], dim=-1) for place in (0, 1))
    return F.cross_entropy(first @ second.T, torch.arange(len(first)))


def spread(output: Tensor, batch: Any) -> Tensor:
    return output.mean(1).var(0).mean()


def by_sample(output: Tensor, batch: Any) -> Tensor:
    return tokens(output, batch, reduction="none").mean()


def with_penalty(output: Tensor, batch: Any) -> Tensor:
    return tokens(output, batch) + output.square().mean()


def build(extra: Callable[[], nn.Module] = nn.Identity) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Model(extra)

    return made


@pytest.mark.parametrize("loss", [DEFAULT.loss, tokens], ids=["default", "own"])
@pytest.mark.parametrize("extra", [nn.Identity, Norm, Balanced])
def test_means_are_left_alone(loss: Any, extra: Callable[[], nn.Module]) -> None:
    assert find_whole_batch_loss(build(extra), batch(), Objective(loss, DEFAULT.count)) is None


@pytest.mark.parametrize("samples", [2, 4, 8])
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output, batch: tokens(output, batch, reduction="sum"), "sum over the batch"),
        (by_sample, "mean over samples"),
        (contrast, "sees samples of the batch together"),
        (spread, "sees samples of the batch together"),
        (with_penalty, "auxiliary loss"),
    ],
    ids=["sum", "by sample", "contrast", "spread", "penalty"],
)
def test_others_are_refused_where_the_batch_is_cut(loss: Any, said: str, samples: int) -> None:
    objective = Objective(loss, DEFAULT.count)
    with pytest.raises(PlanError, match=said):
        check_mean_loss(build(), batch(samples), objective, plan_of(Case("gpt", 0, "none", 2), 1))
    check_mean_loss(build(), batch(samples), objective, plan_of(Case("gpt", 0, "none", 1), 1))


def test_a_count_of_its_own_makes_it_right() -> None:
    objective = Objective(by_sample, lambda batch: len(batch["ids"]))  # type: ignore[call-overload]
    assert find_whole_batch_loss(build(), batch(), objective) is None


def test_a_part_that_centres_its_batch_is_found() -> None:
    assert find_whole_batch_loss(build(Centred), batch(), DEFAULT) is not None


@pytest.mark.parametrize(("nproc", "microbatch"), [(1, 4), (2, 4)])
def test_train_refuses_before_it_touches_a_folder(tmp_path: Path, nproc: int, microbatch: int) -> None:
    settings = Settings(
        model=f"{ASSETS}/own_losses.py:contrast",
        plan=PlanRequest(global_batch=8, microbatch=microbatch),
        out=str(tmp_path / "run"),
    )
    with (
        RunLock(tmp_path / "run") as lock,
        pytest.raises(PlanError, match=r"not the mean of its parts'.*use dp=1 and microbatch=8"),
    ):
        lay_out_on(hand_cluster(nproc), settings, nproc, False, Console(quiet=True), lock)
    assert not (tmp_path / "run").exists()
    whole = msgspec.structs.replace(settings, plan=PlanRequest(global_batch=8, microbatch=8))
    with RunLock(tmp_path / "run") as lock:
        assert lay_out_on(hand_cluster(1), whole, 1, False, Console(quiet=True), lock)


def compare_on_rank(request: PlanRequest) -> ParityResult:
    source = resolve(f"{ASSETS}/own_losses.py:contrast")
    plan = plain_plan(request, capture_source(source, "fp64"), 2, "tests")
    return compare(source, plan, 2, this_rank())


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_plan_that_does_not_cut_the_batch_runs_a_contrast(pool: Pools, cut: dict[str, int]) -> None:
    request = PlanRequest(global_batch=8, microbatch=8, precision="fp64", **cut)  # type: ignore[arg-type]
    for found in pool(2).run(compare_on_rank, request):
        assert found.ok, found.first_difference


class RunningMean:
    """Divides by a mean of the losses it has seen."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        loss = tokens(output, batch)
        self.seen.append(float(loss.detach()))
        return loss / (sum(self.seen) / len(self.seen))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_loss_that_changes_from_call_to_call_is_refused(num_microbatches: int) -> None:
    objective = Objective(RunningMean(), DEFAULT.count)
    with pytest.raises(ModelError, match="another value for the same model and batch"):
        check_mean_loss(build(), batch(), objective, plan_of(Case("gpt", 0, "none", num_microbatches), 1))


def test_a_loss_may_say_that_it_belongs_to_each_microbatch() -> None:
    def own(output: Tensor, batch: Batch) -> Tensor:
        return contrast(output, batch)

    own.depends_on_batch = True  # type: ignore[attr-defined]
    objective = Objective(own, DEFAULT.count)
    assert depends_on_batch(Model(), objective)
    assert find_whole_batch_loss(build(), batch(), objective) is None
