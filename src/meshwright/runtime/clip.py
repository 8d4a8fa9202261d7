"""Clipping by the global norm, the same for whole and for divided gradients.

‖g‖² = Σ over parameters and their parts ‖g_part‖²      -> for each axis that divides some of them, one all-reduce
g ← g · min(1, max_norm / ‖g‖)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from meshwright.core.axes import Axis
from meshwright.core.plan import Plan
from meshwright.runtime.axis import along
from meshwright.runtime.places import places_of

Axes = frozenset[Axis]


def axes_of_parameters(module: nn.Module, plan: Plan) -> list[tuple[nn.Parameter, Axes]]:
    """Every parameter with the axes along which ranks hold different parts of it. ep lies inside dp: under ZeRO the parts of
    an expert are all over dp, like those of any other parameter. Along pp ranks hold different parameters."""
    places = places_of(module)
    sharded = plan.shard_degree > 1
    by_stages: Axes = frozenset({"pp"} if plan.mesh.pp > 1 else ())

    def axes(name: str, parameter: nn.Parameter) -> Axes:
        by_zero: Axes = frozenset({"dp"} if sharded and isinstance(parameter, DTensor) else ())
        cuts = {place.axis for place in places.get(name, ()) if not (sharded and place.axis == "ep")}
        return by_stages | by_zero | cuts

    return [(parameter, axes(name, parameter)) for name, parameter in module.named_parameters()]


def clip(
    parameters: Iterable[tuple[nn.Parameter, Axes]],
    max_norm: float,
    groups: Mapping[Axis, dist.ProcessGroup],
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Scale gradients in place; returns the norm they had. groups: the ranks along each axis, in an order in which at most one
    kind of part is left for the last. counted_elsewhere: copies of parameters whose gradients another rank, or another
    copy, adds to the norm."""
    left_out = {id(parameter) for parameter in counted_elsewhere}
    found: dict[Axes, list[Tensor]] = {}
    counted: dict[Axes, list[Tensor]] = {}
    for parameter, axes in parameters:
        if parameter.grad is not None:
            found.setdefault(axes, []).append(local(parameter.grad))
            counted.setdefault(axes, []).extend([] if id(parameter) in left_out else found[axes][-1:])
    norm = _global_norm({axes: get_total_norm(gradients) for axes, gradients in counted.items()}, groups)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in found.values():
        for gradient in gradients:
            gradient.mul_(coefficient.to(gradient.dtype))
    return norm


def _global_norm(norms: dict[Axes, Tensor], groups: Mapping[Axis, dist.ProcessGroup]) -> Tensor:
    """Axis by axis: what it divides is added up along it, and is then divided by the other axes only."""
    if set(norms) <= {frozenset()}:
        return norms.get(frozenset(), torch.zeros(()))
    dtype = next(iter(norms.values())).dtype
    squares = {axes: norm.to(torch.float64).square() for axes, norm in norms.items()}
    for axis, group in groups.items():
        divided = [axes for axes in squares if axis in axes]
        if not divided:
            continue
        sums = torch.stack([squares.pop(axes) for axes in divided])
        with along(axis):
            dist.all_reduce(sums, group=group)
        for axes, square in zip(divided, sums, strict=True):
            rest = axes - {axis}
            squares[rest] = squares[rest] + square if rest in squares else square
    return squares[frozenset()].sqrt().to(dtype)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
