"""Whether the parts of a tensor are all of it, each place once.

A box is the product of intervals. Written as signed corners (+1 where a side begins, -1 where it ends, multiplied over the dims),
boxes cover a whole exactly once if and only if their corners sum up to the whole's: inner corners cancel. That takes one pass;
comparing boxes with each other takes one for every pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

Corners = dict[tuple[int, ...], int]
Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def fills(shape: tuple[int, ...], boxes: Iterable[Extent]) -> bool:
    """Every place of the shape lies in one box, and no box has a place outside of it."""
    found: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        _add_corners(found, offsets, sizes)
    whole: Counter[tuple[int, ...]] = Counter()
    _add_corners(whole, (0,) * len(shape), shape)
    return _without_zeros(found) == _without_zeros(whole)


def _add_corners(found: Counter[tuple[int, ...]], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    if 0 in sizes:
        return  # it holds nothing
    sides = [((offset, 1), (offset + size, -1)) for offset, size in zip(offsets, sizes, strict=True)]
    for corner in product(*sides):
        sign = 1
        for _, end in corner:
            sign *= end
        found[tuple(place for place, _ in corner)] += sign


def _without_zeros(corners: Counter[tuple[int, ...]]) -> Corners:
    return {place: count for place, count in corners.items() if count}
