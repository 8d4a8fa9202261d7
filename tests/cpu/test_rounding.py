"""The bound of parity for models that enlarge rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
    assert enlarged(ours, {name: 2 * tensor for name, tensor in ours.items()}, floor) == MOST, (
        "no error hides behind it"
    )
