"""Cuts of a row of units into stages. What the units are, rules/stages.py says: the embedding, repeated blocks, the head."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise
from math import comb

from meshwright.core.request import Ends
from meshwright.rules.stages import Units, most_stages, unit_counts

Cut = tuple[int, ...]
"""Where each stage ends: the number of units before it. The last one is the number of units."""
RANKED_UNITS = 24
"""Of a model with no more units all cuts are compared, as far as they are not too many (cuts/ranked_cuts.py)."""
FEW_UNITS = 12
"""A model with at most this many repeated blocks is not deep: the search tries every schedule and number of stages."""


def sizes_of(cut: Cut) -> list[int]:
    """Units of each stage."""
    return [end - begin for begin, end in pairwise((0, *cut))]


def num_cuts(num_units: int, num_stages: int) -> int:
    return comb(num_units - 1, num_stages - 1)


def every_cut(num_units: int, num_stages: int) -> Iterator[Cut]:
    """Every way to give each stage at least one of the units."""
    for ends in combinations(range(1, num_units), num_stages - 1):
        yield (*ends, num_units)


def even_cut(units: Units, num_stages: int, ends: Ends | None) -> Cut:
    """The cut that a plain plan has. Where the ends are open and blocks are too few for all stages, the ends count as blocks."""
    blocks_suffice = num_stages <= most_stages(units, "even")
    return tuple(accumulate(unit_counts(units, num_stages, ends or ("even" if blocks_suffice else "fewer"))))
