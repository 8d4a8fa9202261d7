"""The axes of a mesh: what planning, costing and running ask about each of them, in one table.

ranks of a plan        the product of the degrees of RANK_AXES. An axis that lies inside another divides it, and adds no ranks
numbers of ranks       the first axis is the outermost, the last one the innermost: neighbours along tp are on one host
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Axis = Literal["pp", "dp", "cp", "tp", "ep"]


@dataclass(frozen=True, kw_only=True)
class AxisKind:
    """One axis. No field has a default: an axis that lacks one fails when this package is loaded."""

    title: str
    """Its name before "parallel"."""
    inside: Axis | None
    """The axis whose ranks it divides into groups; None where it has ranks of its own."""
    divides_model: bool
    """Whether its ranks run one model together, rather than each a replica of it."""
    shards_tensors: bool
    """Whether a dim of a tensor can be sharded over it."""


AXES: dict[Axis, AxisKind] = {
    "pp": AxisKind(title="pipeline", inside=None, divides_model=True, shards_tensors=False),
    "dp": AxisKind(title="data", inside=None, divides_model=False, shards_tensors=True),
    "cp": AxisKind(title="context", inside=None, divides_model=True, shards_tensors=True),
    "tp": AxisKind(title="tensor", inside=None, divides_model=True, shards_tensors=True),
    "ep": AxisKind(title="expert", inside="dp", divides_model=True, shards_tensors=True),
}
"""Outermost first."""

if unknown := set(get_args(Axis)) ^ set(AXES):
    raise TypeError(f"axis '{min(unknown)}' is a name without a row in AXES, or a row without a name")
RANK_AXES: tuple[Axis, ...] = tuple(axis for axis, kind in AXES.items() if kind.inside is None)
MODEL_AXES: tuple[Axis, ...] = tuple(axis for axis, kind in AXES.items() if kind.divides_model)
TENSOR_AXES: tuple[Axis, ...] = tuple(axis for axis, kind in AXES.items() if kind.shards_tensors)
