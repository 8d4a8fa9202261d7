"""How a tensor lies over ranks: noted on the tensor itself, which stays an ordinary torch tensor.

A tensor without a note is *whole*: each rank of an axis has all of it, the same on each. One with a note is this rank's part;
for every axis it lies over, the note says how:

    Cut(dim, runs)   the dim is cut over the ranks in order. runs > 1: the dim is that many equal runs, one after another,
                     and each of them is cut (tokens of several samples in a row; a fused query, key and value)
    Cut(…, rest)     a run that the ranks do not divide: the first `rest` of them have one element of it more than the others
    Addend(bias)     each rank has a summand; the tensor is their sum, and the bias, if any, is added to that once

Where two axes cut one dim, the one noted first cut it first: the later one has cut the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from meshwright.core.axes import Axis

NOTE = "_meshwright_layout"


class Cut(NamedTuple):
    dim: int
    runs: int = 1
    rest: int = 0

    def at(self, dim: int) -> Cut:
        """The same cut of another dim."""
        return self._replace(dim=dim)


class Addend(NamedTuple):
    bias: Tensor | None = None


Share = Cut | Addend
Layout = dict[Axis, Share]
"""Axis → how the tensor lies over it; axes it is whole along are left out."""


class Line(Protocol):
    """The ranks along one axis, as one of them sees them."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...


Lines = Mapping[Axis, Line]


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


def whole_size(part: int, cut: Cut, line: Line) -> int:
    """Of a dim, from what this rank has of it."""
    of_run = part // cut.runs
    return cut.runs * ((of_run - (line.rank < cut.rest)) * line.size + cut.rest)


def part_size(whole: int, cut: Cut, line: Line) -> int:
    """What this rank has of a dim."""
    each, rest = divmod(whole // cut.runs, line.size)
    return cut.runs * (each + (line.rank < rest))


def whole_shape(local: tuple[int, ...], layout: Layout, lines: Lines) -> tuple[int, ...]:
    """Sizes of the whole tensor, from those of a part."""
    sizes = list(local)
    for axis, cut in reversed(cuts(layout).items()):
        sizes[cut.dim] = whole_size(sizes[cut.dim], cut, lines[axis])
    return tuple(sizes)


def part_shape(whole: tuple[int, ...], layout: Layout, lines: Lines) -> tuple[int, ...]:
    """Sizes of this rank's part, from those of the whole tensor."""
    sizes = list(whole)
    for axis, cut in cuts(layout).items():
        sizes[cut.dim] = part_size(sizes[cut.dim], cut, lines[axis])
    return tuple(sizes)


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share their memory."""
    return int(tensor.untyped_storage()._cdata)
