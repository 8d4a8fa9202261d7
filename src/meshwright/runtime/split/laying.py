"""Tensors laid in a wanted way: what lies otherwise over ranks is swapped, narrowed or gathered.

Where two axes cut one dim, the order in which they cut it is part of how a tensor lies: parts that two axes cut in another order
hold other elements, though they are as large. Such a tensor is gathered and cut anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.runtime.split.layout import Cut, cuts, layout_of
from meshwright.runtime.split.splitter import NotSplit, Splitter

Target = dict[Axis, Cut]
ROUNDS = 3
ELSEWHERE = Cut(-1)
"""A cut of a dim that the tensor to be laid lacks."""


def laid(split: Splitter, tensor: Tensor, target: Target, missing: int = 0, whole_dims: Iterable[int] = ()) -> Tensor:
    """The tensor, without addends, ready to be combined with one that lies as the target says.

    missing: how many dims fewer it has, in front. whole_dims: along these it stays whole, as along dims of size one.
    """
    sizes = split.shape(tensor)
    has = {
        axis: cut.dim >= missing and sizes[cut.dim - missing] > 1 and cut.dim - missing not in whole_dims
        for axis, cut in target.items()
    }
    own = {axis: cut.at(cut.dim - missing) for axis, cut in target.items() if has[axis]}
    tensor = _in_order(split, tensor, own)
    for axis in [axis for axis in cuts(layout_of(tensor)) if axis not in target]:
        tensor = split.gather(tensor, axis)
    gathered = [axis for axis in target if axis not in own and axis in cuts(layout_of(tensor))]
    for axis in gathered:
        if axis in cuts(layout_of(tensor)):
            tensor = split.gather(tensor, axis, read_by_parts=True)
    tensor = _cut_to(split, tensor, own)
    for axis in target:
        if axis not in own and axis not in gathered:
            tensor = split.lend(tensor, axis)
    return tensor


def _cut_to(split: Splitter, tensor: Tensor, own: Target) -> Tensor:
    """A swap along one axis may gather what another cut along the same dim: that is cut anew."""
    for _ in range(ROUNDS):
        for axis, wanted in own.items():
            move = split.swap if axis in cuts(layout_of(tensor)) else split.narrow
            tensor = move(tensor, axis, wanted) if cuts(layout_of(tensor)).get(axis) != wanted else tensor
        if cuts(layout_of(tensor)) == own:
            return tensor
    raise NotSplit("tensors that two axes cut along the same dims meet")


def _in_order(split: Splitter, tensor: Tensor, target: Target) -> Tensor:
    """Whole along dims that two axes cut, in the tensor or in the target, unless both are cut alike."""
    here = cuts(layout_of(tensor))
    doubled = _doubled(here) | _doubled(target)
    wrong = {dim for dim in doubled if _along(here, dim) != _along(target, dim)}
    moving = [axis for axis in here if here[axis].dim in wrong or (axis in target and target[axis].dim in wrong)]
    for axis in reversed(moving):
        if axis in cuts(layout_of(tensor)):
            tensor = split.gather(tensor, axis)
    return tensor


def _along(target: Target, dim: int) -> list[tuple[Axis, Cut]]:
    return [(axis, cut) for axis, cut in target.items() if cut.dim == dim]


def _doubled(target: Target) -> set[int]:
    """Dims that two axes cut."""
    dims = [cut.dim for cut in target.values()]
    return {dim for dim in dims if dims.count(dim) > 1}


def cut_as(split: Splitter, whole: Tensor, target: Target) -> Tensor:
    """This rank's part of a whole tensor."""
    for axis, cut in target.items():
        whole = split.narrow(whole, axis, cut)
    return whole
