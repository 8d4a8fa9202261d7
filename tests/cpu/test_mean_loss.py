"""A loss that is not the mean of its parts' is found, and refused for plans that cut the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, plan_of
from torch import Tensor, nn

from meshwright.core.errors import PlanError
from meshwright.measure.mean_loss import check_mean_loss, depends_on_batch, find_whole_batch_loss
from meshwright.models.objective import DEFAULT, Batch, Objective

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
    ],
    ids=["sum", "by sample", "contrast", "spread"],
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


def test_a_loss_may_say_that_it_belongs_to_each_microbatch() -> None:
    def own(output: Tensor, batch: Batch) -> Tensor:
        return contrast(output, batch)

    own.depends_on_batch = True  # type: ignore[attr-defined]
    objective = Objective(own, DEFAULT.count)
    assert depends_on_batch(Model(), objective)
    assert find_whole_batch_loss(build(), batch(), objective) is None
