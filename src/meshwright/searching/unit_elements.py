"""Elements of parameters that are trained in each unit, and that are reduced together behind each block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from meshwright.core.graph import Graph, Parameter
from meshwright.core.plan import Mesh
from meshwright.cost.memory.local_parameters import cut_shape
from meshwright.rules.groups import shard_groups

Splits = dict[tuple[str, str], int]
"""Block and name of a parameter → the dim that tp splits."""


class Trained(NamedTuple):
    """A parameter that is trained, at its first name; the block behind which its gradient is reduced, '' for none."""

    parameter: Parameter
    unit: int
    group: str


def trained_parameters(graph: Graph, units: Sequence[Sequence[str]]) -> list[Trained]:
    """units: the blocks of each."""
    found, seen = [], set[str]()
    blocks = [block for unit in units for block in unit]
    groups = shard_groups(graph.parameters_of(blocks), blocks)
    group_of = {one.name: name for name, members in groups.items() for one in members}
    for number, unit in enumerate(units):
        for parameter in graph.parameters_of([*([""] if number == 0 else []), *unit]):
            name = parameter.tied_to or parameter.name
            if parameter.trainable and name not in seen:
                found.append(Trained(parameter, number, group_of.get(parameter.name, "")))
            seen.add(name)
    return found


@dataclass(frozen=True)
class Elements:
    """Elements that a rank trains."""

    dense: list[float]
    expert: list[float]
    """Elements of every unit outside its experts, and in its experts."""
    by_group: dict[str, float]
    """Of the gradients that are reduced together behind each block, before ZeRO shards them."""


def elements_of(trained: Iterable[Trained], num_units: int, mesh: Mesh, splits: Splits) -> Elements:
    found = Elements([0.0] * num_units, [0.0] * num_units, {})
    for parameter, unit, group in trained:
        size = prod(cut_shape(parameter, mesh, splits.get((parameter.block, parameter.own_name))))
        (found.expert if parameter.expert else found.dense)[unit] += size
        if group:
            found.by_group[group] = found.by_group.get(group, 0.0) + size
    return found
