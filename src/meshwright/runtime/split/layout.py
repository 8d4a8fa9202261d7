"""How a tensor lies over ranks: noted on the tensor itself, which stays an ordinary torch tensor.

A tensor without a note is *whole*: each rank of an axis has all of it, the same on each. One with a note is this rank's part;
for every axis it lies over, the note says how:

    Cut(dim, runs)   the dim is cut over the ranks in order. runs > 1: the dim is that many equal runs, one after another,
                     and each of them is cut (tokens of several samples in a row; a fused query, key and value)
    Addend(bias)     each rank has a summand; the tensor is their sum, and the bias, if any, is added to that once

Where two axes cut one dim, the one noted first cut it first: the later one has cut the parts.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from torch import Tensor

from meshwright.core.collective import Axis

NOTE = "_meshwright_layout"


class Cut(NamedTuple):
    dim: int
    runs: int = 1


class Addend(NamedTuple):
    bias: Tensor | None = None


Share = Cut | Addend
Layout = dict[Axis, Share]
"""Axis → how the tensor lies over it; axes it is whole along are left out."""
Degrees = dict[Axis, int]


def layout_of(tensor: Tensor) -> Layout | None:
    """None: the tensor is whole."""
    return getattr(tensor, NOTE, None)


def lay(tensor: Tensor, layout: Layout | None) -> Tensor:
    """Note a layout on a tensor, which is returned."""
    if layout:
        setattr(tensor, NOTE, layout)
    return tensor


def cuts(layout: Layout | None) -> dict[Axis, Cut]:
    return {axis: share for axis, share in (layout or {}).items() if isinstance(share, Cut)}


def moved(layout: Layout, axis: Axis, share: Share | None) -> Layout:
    """The layout with one axis laid anew, as the latest; None: whole along it now."""
    others = {other: kept for other, kept in layout.items() if other != axis}
    return others if share is None else {**others, axis: share}


def whole_shape(local: tuple[int, ...], layout: Layout, degrees: Degrees) -> tuple[int, ...]:
    """Sizes of the whole tensor, from those of a part."""
    sizes = list(local)
    for axis, cut in cuts(layout).items():
        sizes[cut.dim] *= degrees[axis]
    return tuple(sizes)


def part_shape(whole: tuple[int, ...], layout: Layout, degrees: Degrees) -> tuple[int, ...]:
    """Sizes of a part, from those of the whole tensor."""
    divisors = {dim: prod(degrees[a] for a, cut in cuts(layout).items() if cut.dim == dim) for dim in range(len(whole))}
    return tuple(size // divisors[dim] for dim, size in enumerate(whole))


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share their memory."""
    return int(tensor.untyped_storage()._cdata)
