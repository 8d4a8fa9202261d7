"""The bound of parity for models that enlarge rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.measure.parity import _Tally
from meshwright.measure.rounding import GROWTH, MOST, enlarged, move_parameters


def deep() -> nn.Module:
    """Batch norms over two values: each divides by a spread that may be tiny."""
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
    return nn.Sequential(*layers).double()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    module(torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).double()).pow(3).sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def test_every_entry_moves_by_one_epsilon() -> None:
    whole, moved = deep(), deep()
    move_parameters(moved)
    for before, after in zip(whole.parameters(), moved.parameters(), strict=True):
        nonzero = before != 0
        share = ((after - before) / before)[nonzero].abs()
        assert (share <= 4.5e-16).all()
        assert (share > 0).float().mean() > 0.5 or not nonzero.any()


def test_the_bound_grows_with_what_rounding_does_and_never_above_the_most() -> None:
    whole, moved = deep(), deep()
    move_parameters(moved)
    ours, twins = gradients(whole), gradients(moved)
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in ours.values())
    bound = enlarged(ours, twins, floor)
    assert GROWTH * 2.3e-16 < bound <= MOST
    assert enlarged(ours, ours, floor) == 0.0
    assert enlarged(ours, {name: 2 * tensor for name, tensor in ours.items()}, floor) > MOST, "no error hides behind it"


@pytest.mark.parametrize(("difference", "is_found"), [(1e-6, False), (1e-2, True)])
def test_a_difference_within_rounding_that_is_above_the_most_is_no_verdict(difference: float, is_found: bool) -> None:
    """One process that moves by 1e-7 a parameter cannot tell a plan that does from a wrong one."""
    expected = {"weight": torch.ones(2, dtype=torch.float64)}
    tally = _Tally(bound=1e-12)
    tally.enlarge(expected, {"weight": expected["weight"] * (1 + 1e-7)})
    tally.parameters({"weight": expected["weight"] * (1 + difference)}, expected)
    assert tally.result().ok != is_found
    assert (tally.unsure is None) == is_found
    if not is_found:
        assert "weight differs by 1e-06, and rounding alone does as much" in str(tally.no_verdict())
