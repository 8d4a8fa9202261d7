"""Layers that ask torch.distributed compute what one process computes; modules of several names are cut rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import ASSETS
from pool import RankPool
from test_strangers import run_alike

from meshwright.core.errors import PlanError
from meshwright.measure.distance import distance, largest
from meshwright.models.faked.unchanged import unchanged
from meshwright.models.one_process import as_one_process, as_replicas

INFINITE = float("inf")


def named(model: str) -> str:
    return f"{ASSETS}/shared_and_distributed.py:{model}"


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("asks_for_ranks", {"tp": 2}),
        ("asks_for_ranks", {"pp": 2}),
        ("asks_when_built", {"tp": 2}),
        ("part_outside_of_blocks", {"pp": 2}),
        ("layer_twice_in_a_list", {"pp": 2}),
        ("mask_of_infinities", {"tp": 2}),
    ],
)
def test_parity(pool: Callable[[int], RankPool], model: str, axes: dict[str, Any]) -> None:
    run_alike(pool, named(model), axes)


def seen_on_rank() -> dict[str, Any]:
    def ask() -> tuple[bool, int]:
        return dist.is_initialized(), dist.get_world_size()

    with as_one_process():
        hidden = ask()
        try:
            dist.all_reduce(torch.ones(1))
            refused = ""
        except PlanError as error:
            refused = str(error)
        with as_replicas():
            nested = ask()
    with as_replicas(), as_one_process():
        shown = ask()
    return {"hidden": hidden, "refused": refused, "nested": nested, "shown": shown, "after": ask()}


def test_what_a_models_code_sees(pool: Callable[[int], RankPool]) -> None:
    for seen in pool(2).run(seen_on_rank):
        assert seen["hidden"] == seen["nested"] == (False, 1)
        assert seen["shown"] == seen["after"] == (True, 2)
        assert "torch.distributed.all_reduce" in seen["refused"]
        assert "test_shared_and_distributed.py:" in seen["refused"]


def test_equal_infinities_differ_by_nothing_and_hide_nothing() -> None:
    expected = torch.tensor([1.0, -INFINITE, INFINITE, float("nan")])
    assert distance(expected.clone(), expected) == 0.0
    assert largest(expected) == 1.0
    assert distance(torch.tensor([1.5, -INFINITE, INFINITE, float("nan")]), expected) == 0.5
    assert distance(torch.tensor([1.0, INFINITE, INFINITE, float("nan")]), expected) == INFINITE
    assert distance(torch.tensor([1.0, -INFINITE, INFINITE, 2.0]), expected) == INFINITE


class NotInstalled:
    """Stands for a package that is not there."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"no package to look up {name} in")


optional_package = NotInstalled()


class Reads(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_stand_in_for_a_package_is_asked_nothing() -> None:
    with unchanged(Reads()):
        pass
