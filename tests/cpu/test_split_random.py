"""Random functions on tensors that lie over ranks: parts are drawn apart, whole tensors alike, recompute draws the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.core.axes import Axis
from meshwright.runtime._torch import DisableTorchFunction
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Addend, Cut, Share, lay
from meshwright.runtime.split.splitter import Splitter

Pools = Callable[[int], RankPool]
SIZES = (4, 8, 32, 16)


def _attend(tensor: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(tensor, tensor, torch.ones_like(tensor), dropout_p=0.5)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda t: F.dropout(t, 0.3),
    "dropout in place": lambda t: F.dropout(t.clone(), 0.3, True, True),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.3, True),
    "dropout2d": lambda t: F.dropout2d(t, 0.3),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.3, True),
    "attention": _attend,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda t: torch.bernoulli(t * 0.7),
    "bernoulli_": lambda t: torch.empty_like(t).bernoulli_(0.7),
    "normal_": lambda t: t.clone().normal_(0.5),
    "uniform_": lambda t: t.clone().uniform_(),
    "exponential_": lambda t: t.clone().exponential_(),
    "poisson": lambda t: torch.poisson(t * 3),
    "normal": lambda t: torch.normal(t, t),
    "rrelu": lambda t: F.rrelu(-t, training=True),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t * 0.1, dim=-1),
}
SHARES: dict[str, Share | None] = {"whole": None, "cut": Cut(1), "summand": Addend()}


def draws_on_rank(axis: Axis) -> dict[str, dict[str, Any]]:
    """For each draw and layout: this rank's part, the common state behind it, and whether recompute draws the same."""
    ranks = Ranks(axis, dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    found: dict[str, dict[str, Any]] = {}
    for name, draw in DRAWS.items():
        for way, share in SHARES.items():
            torch.manual_seed(1)
            whole = torch.ones(SIZES, dtype=torch.float64)
            part = ranks.own_part(whole, Cut(1)).clone() if way == "cut" else whole / (1 if share is None else 2)
            lay(part, {} if share is None else {axis: share})
            seen: list[Tensor] = []
            made = checkpoint(_following(draw, Splitter([ranks]), seen), part.requires_grad_(), use_reentrant=False)
            state = torch.rand(3)
            made.sum().backward()
            found[f"{name}, {way}"] = {"part": seen[0], "state": state, "same": len(seen) == 2 and torch.equal(*seen)}
    return found


def _following(draw: Callable[[Tensor], Tensor], splitter: Splitter, seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """As a block within its border: the Splitter is active when it runs again, too."""

    def run(tensor: Tensor) -> Tensor:
        with splitter:
            made = draw(tensor)
            with DisableTorchFunction():
                seen.append(made.detach().clone())
            return made * tensor.exp()

    return run


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_parts_are_drawn_apart_and_whole_tensors_alike(pool: Pools, axis: Axis) -> None:
    one, other = pool(2).run(draws_on_rank, axis)
    for name in one:
        assert torch.equal(one[name]["state"], other[name]["state"]), f"{name}: the common state drifts apart"
        assert one[name]["same"], f"{name}: recompute draws otherwise"
        if name.endswith("cut"):
            assert not torch.equal(one[name]["part"], other[name]["part"]), (
                f"{name}: ranks draw the same for their parts"
            )
        else:
            assert torch.equal(one[name]["part"], other[name]["part"]), f"{name}: ranks draw apart for what all have"


def test_as_much_is_kept_as_on_the_whole(pool: Pools) -> None:
    """Within five standard deviations of the mean of 16,384 draws."""
    one, other = pool(2).run(draws_on_rank, "tp")
    for name, expected in (("dropout", 0.7), ("bernoulli", 0.7), ("bernoulli_", 0.7), ("dropout2d", 0.7)):
        parts = torch.cat([found[f"{name}, cut"]["part"] for found in (one, other)], 1)
        num = 32 if name == "dropout2d" else parts.numel()
        assert abs(float((parts != 0).double().mean()) - expected) < 5 * (expected * (1 - expected) / num) ** 0.5
