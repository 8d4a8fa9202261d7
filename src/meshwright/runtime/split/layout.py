"""How a tensor lies over ranks: noted on the tensor itself, which stays an ordinary torch tensor.

A tensor without a note is *whole*: each rank of an axis has all of it, the same on each. One with a note is this rank's part;
for every axis it lies over, the note says how:

    Cut(dim, groups)   the dim is cut over the ranks in order. groups > 1: the dim is that many runs, one after another,
                       each of them cut (tokens of several samples laid in a row)
    Addend             each rank has a summand; the tensor is their sum

Sizes that the model reads are those of the whole tensor (runtime/split/mode.py).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from meshwright.core.collective import Axis

NOTE = "_meshwright_layout"


class Cut(NamedTuple):
    dim: int
    groups: int = 1


class Addend(NamedTuple):
    """`pending`: a bias that is added once, when the sum has been made."""

    pending: Tensor | None = None


Share = Cut | Addend
Layout = dict[Axis, Share]
"""Axis → how the tensor lies over it; axes it is whole along are left out."""


def layout_of(tensor: Tensor) -> Layout | None:
    """None: the tensor is whole."""
    return getattr(tensor, NOTE, None)


def lay(tensor: Tensor, layout: Layout | None) -> Tensor:
    """Note a layout on a tensor, which is returned."""
    if layout:
        setattr(tensor, NOTE, layout)
    return tensor
