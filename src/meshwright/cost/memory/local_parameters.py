"""The parameters that one rank holds, and the bytes of each of their elements with gradient and optimizer state.

A rank holds the parameters of the blocks on its pp coordinate, with the dims that lie over tp or ep cut:
                                                                                                  -> local_parameters
ZeRO then shards every tensor along its first dim over N ranks, the last shard padded: a tensor of d rows gives each rank
⌈d / N⌉ of them.                                                                                  -> shard_elements

Bytes an element: 4 + 4 + 4 + 4 as Meshwright keeps them (parameter, gradient, two moments); 2 + 2 + 4 + 8 with 16-bit
parameters and fp32 master weights.                                                                -> Items
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import msgspec

from meshwright.core.graph import PRECISION_BYTES, Graph, Parameter
from meshwright.core.plan import Mesh, Plan
from meshwright.core.recipe import Recipe
from meshwright.core.units import ceil_div
from meshwright.rules.groups import shard_groups
from meshwright.rules.sharding import rules_by_block


@dataclass(frozen=True)
class Items:
    """Bytes of one element of a parameter, of its gradient and of its optimizer state."""

    parameter: int
    gradient: int
    state: int
    """Optimizer slots and master weights together."""
    gathered: int
    reduced: int


def items_of(plan: Plan, recipe: Recipe) -> Items:
    stored, system = plan.master_bytes, recipe.system
    narrow = plan.stores_16_bits and not system.parameter_item_bytes
    parameter = system.parameter_item_bytes or (PRECISION_BYTES[plan.precision] if narrow else stored)
    gradient = system.gradient_item_bytes or parameter
    return Items(
        parameter=parameter,
        gradient=gradient,
        state=recipe.optimizer_slots * stored + (stored if narrow else system.master_item_bytes),
        gathered=system.gather_item_bytes or PRECISION_BYTES[plan.precision],
        reduced=system.reduce_item_bytes or gradient,
    )


def moment_bytes(plan: Plan) -> int:
    """Bytes of an element of one optimizer slot on the host."""
    return PRECISION_BYTES["bf16"] if plan.offload.moments == "bf16" else plan.master_bytes


def blocks_on(plan: Plan, coordinate: int) -> tuple[str, ...]:
    """The blocks of one pp coordinate, in order."""
    return tuple(name for number in plan.stages_on(coordinate) for name in plan.blocks_by_stage[number])


def local_parameters(graph: Graph, plan: Plan, coordinate: int) -> tuple[Parameter, ...]:
    """Each tensor that a rank on this coordinate holds, in its shape before ZeRO."""
    splits = split_dims(graph, plan)
    stages = (stage_parameters(graph, plan, number, splits) for number in plan.stages_on(coordinate))
    return tuple(chain.from_iterable(stages))


def stage_parameters(
    graph: Graph, plan: Plan, number: int, splits: dict[tuple[str, str], int] | None = None
) -> tuple[Parameter, ...]:
    """The tensors of one stage; a tensor with several tied names counts once. Block '' is on the first stage.

    splits: `split_dims` of the plan, for callers that ask for many stages.
    """
    here = [*([""] if number == 0 else []), *plan.blocks_by_stage[number]]
    splits = split_dims(graph, plan) if splits is None else splits
    found: dict[str, Parameter] = {}
    for parameter in graph.parameters_of(here):
        found.setdefault(parameter.tied_to or parameter.name, parameter)
    shapes = {name: cut_shape(p, plan.mesh, splits.get((p.block, p.own_name))) for name, p in found.items()}
    return tuple(msgspec.structs.replace(p, shape=shapes[name], tied_to=None) for name, p in found.items())


def split_dims(graph: Graph, plan: Plan) -> dict[tuple[str, str], int]:
    """(block, tensor) → the dim that is sharded over tp."""
    return {
        (block, tensor.tensor): tensor.dims.index("tp")
        for block, rule in rules_by_block(plan, graph).items()
        for tensor in rule.tensors
        if "tp" in tensor.dims
    }


def cut_shape(parameter: Parameter, mesh: Mesh, split_dim: int | None) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor before ZeRO. split_dim: the dim that is sharded over tp."""
    if split_dim is None and not parameter.expert:
        return parameter.shape
    shape = list(parameter.shape)
    if split_dim is not None:
        shape[split_dim] = ceil_div(shape[split_dim], mesh.tp)
    if parameter.expert and shape:
        shape[0] = ceil_div(shape[0], mesh.ep)
    return tuple(shape)


def shard_elements(parameter: Parameter, degree: int) -> int:
    """Elements of the padded shard one rank holds."""
    if degree == 1 or not parameter.shape:
        return parameter.num_elements
    rows = parameter.shape[0]
    row_elements = parameter.num_elements // rows if rows else 0
    return ceil_div(rows, degree) * row_elements


def total_elements(parameters: Iterable[Parameter], degree: int = 1, *, trainable_only: bool = False) -> int:
    return sum(shard_elements(p, degree) for p in parameters if p.trainable or not trainable_only)


def shard_degree(parameter: Parameter, plan: Plan) -> int:
    """Over how many ranks ZeRO splits a tensor: an expert's tensor, over the ranks that hold the same experts."""
    if parameter.expert and plan.mesh.ep > 1:
        return min(plan.shard_degree, plan.mesh.dp * plan.mesh.cp // plan.mesh.ep)
    return plan.shard_degree


def held_elements(parameters: Iterable[Parameter], plan: Plan, *, trainable_only: bool = False) -> int:
    """Elements of the shards one rank holds under the plan's ZeRO."""
    return sum(shard_elements(p, shard_degree(p, plan)) for p in parameters if p.trainable or not trainable_only)


def groups_of(parameters: Iterable[Parameter], plan: Plan) -> dict[str, tuple[Parameter, ...]]:
    """Parameters gathered and reduced together; groups without parameters left out."""
    groups = shard_groups(parameters, plan.blocks)
    return {name: group for name, group in groups.items() if group}
