"""The best sharding of every kind of block under given degrees, found by an integer program.

    best_sharding(graph, cluster, tp=8, microbatch=1).sharding  →  what a plan's `sharding` is

sharding/program.py states the program; its costs come from the cost room. The same arguments give the same sharding, so a caller
may keep the answer by (tp, cp, sequence_parallel, microbatch).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph
from meshwright.core.legal import LegalSharding
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, Mesh, Plan, Stage, TensorSharding
from meshwright.core.recipe import Recipe
from meshwright.cost.compute.kernel_costs import KernelCosts
from meshwright.rules.labels import Way
from meshwright.rules.sharding import block_sharding
from meshwright.searching.sharding.costs import ShardCosts
from meshwright.searching.sharding.objective import Objective
from meshwright.searching.sharding.program import ShardProgram
from meshwright.searching.sharding.units import Unit, units_of


@dataclass(frozen=True)
class FoundSharding:
    """What the program found: the sharding, and the seconds that it minimised, of one microbatch through all blocks."""

    sharding: tuple[BlockSharding, ...]
    seconds: float


def best_sharding(
    graph: Graph,
    cluster: Cluster,
    *,
    tp: int,
    cp: int = 1,
    sequence_parallel: bool = False,
    microbatch: int,
    recipe: Recipe | None = None,
    legal: tuple[LegalSharding, ...] = (),
    bytes_price: float = 0.0,
    num_microbatches: int = 1,
    kernels: KernelCosts | None = None,
) -> FoundSharding | None:
    """Which weights to split over tp, none where nothing is worth splitting; None where nothing can be split.

    legal: what the runtime answered about proposals before; tensors it left whole stay so, dims it cut in runs are.
    bytes_price: seconds of a microbatch that a byte of memory on every rank is worth, of state and of what is kept for backward.
    num_microbatches: over how many of them a step's update, and its sums of gradients, are spread.
    kernels: of the graph on the cluster's device, where they are known.
    """
    answer = next((one for one in legal if one.key[:3] == (tp, cp, sequence_parallel)), None)
    if tp == 1 or (answer is not None and answer.refusal):
        return None
    plan = _bare_plan(graph, Mesh(tp=tp, cp=cp), sequence_parallel, microbatch)
    costs = ShardCosts(
        graph, plan, cluster, recipe or Recipe(), kernels, bytes_price=bytes_price, num_microbatches=num_microbatches
    )
    units = units_of(graph, tp, answer)
    solved = Objective(ShardProgram(units, graph, sequence_parallel=sequence_parallel), graph, costs).solve()
    if solved is None:
        return None
    ways, seconds = solved
    rules = (_rule(unit, own, answer) for unit, own in zip(units, ways, strict=True))
    return FoundSharding(tuple(rule for rule in rules if rule is not None), seconds)


def _bare_plan(graph: Graph, mesh: Mesh, sequence_parallel: bool, microbatch: int) -> Plan:
    """A plan without a sharding, with all that the cost room needs to cost the ops of blocks."""
    names = tuple(block.name for block in graph.blocks if block.name)
    return Plan(
        mesh=mesh, stages=(Stage(coordinate=0, blocks=names),), sequence_parallel=sequence_parallel, microbatch=microbatch,
        num_microbatches=1, global_batch=microbatch, precision=graph.precision,
    )  # fmt: skip


def _rule(unit: Unit, ways: dict[str, Way], answer: LegalSharding | None) -> BlockSharding | None:
    rule = block_sharding((name for name in unit.blocks if name), unit.kind, unit.parameters, ways)
    if rule is None or answer is None:
        return rule
    known = {tensor.tensor: tensor for tensor in _answered(unit.blocks[0], answer)}
    tensors = (_in_runs(tensor, known.get(tensor.tensor)) for tensor in rule.tensors)
    return msgspec.structs.replace(rule, tensors=tuple(tensors))


def _answered(block: str, answer: LegalSharding) -> tuple[TensorSharding, ...]:
    return next((rule.tensors for rule in answer.sharding if block in expand_names(rule.for_blocks)), ())


def _in_runs(tensor: TensorSharding, known: TensorSharding | None) -> TensorSharding:
    """The tensor, split in as many runs as the runtime answered."""
    if known is None or known.dims != tensor.dims:
        return tensor
    return msgspec.structs.replace(tensor, runs=known.runs)
