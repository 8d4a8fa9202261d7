"""What one rank holds of the training state, in elements. Ψ: trainable parameters, N: ranks that share them.

ZeRO shards every tensor along its first dim, the last shard padded: a tensor of d rows gives each rank ⌈d / N⌉ of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.graph import Graph, Parameter
from meshwright.core.groups import shard_groups
from meshwright.core.plan import Plan
from meshwright.core.units import ceil_div


def shard_elements(parameter: Parameter, degree: int) -> int:
    """Elements of the padded shard one rank holds."""
    if degree == 1 or not parameter.shape:
        return parameter.num_elements
    rows = parameter.shape[0]
    row_elements = parameter.num_elements // rows if rows else 0
    return ceil_div(rows, degree) * row_elements


def total_elements(parameters: Iterable[Parameter], degree: int = 1, *, trainable_only: bool = False) -> int:
    return sum(shard_elements(p, degree) for p in parameters if p.trainable or not trainable_only)


def groups_of(graph: Graph, plan: Plan) -> dict[str, tuple[Parameter, ...]]:
    """Parameters gathered and reduced together; groups without parameters left out."""
    groups = shard_groups(graph.parameters, plan.blocks)
    return {name: group for name, group in groups.items() if group}
