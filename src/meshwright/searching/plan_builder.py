"""From a point of the space to a Plan. Every method of search makes its plans here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from meshwright.core.names import compact_names
from meshwright.core.plan import BlockSharding, Offload, Plan, Recompute, RecomputeMode
from meshwright.rules.stages import cut_stages
from meshwright.rules.tokens import token_names
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point


def make_plan(
    problem: Problem,
    point: Point,
    counts: Sequence[int],
    sharding: tuple[BlockSharding, ...],
    recompute: tuple[Recompute, ...] = (),
    offload: Offload | None = None,
) -> Plan:
    """A PlanError says why there is no such plan. counts: units of each stage. offload: without it, the plain one of the point's
    kind."""
    shape, graph = point.shape, problem.graph
    return Plan(
        model=graph.model,
        graph=graph.identity,
        cluster=problem.cluster_hash,
        mesh=shape.mesh,
        stages=cut_stages(problem.units.blocks, counts, shape.pp, point.schedule),
        sharding=sharding,
        sequence_parallel=shape.sequence_parallel,
        context=shape.context,
        token_blocks=token_names(graph, shape.cp),
        zero=point.zero,
        hybrid=point.hybrid,
        recompute=recompute,
        offload=offload or problem.request.offloading(point.offload),
        schedule=point.schedule,
        virtual=point.virtual,
        microbatch=shape.microbatch,
        num_microbatches=shape.num_microbatches,
        global_batch=shape.dp * shape.num_microbatches * shape.microbatch,
        precision=graph.precision,
        compile=shape.compile,
        sync_batch_norm=bool(problem.request.sync_batch_norm),
    )


def rules_of(blocks: Iterable[str], recomputed: Mapping[RecomputeMode, Collection[str]]) -> tuple[Recompute, ...]:
    """Blocks in their order, and those that are recomputed in each mode → the rules of a plan."""
    every = tuple(blocks)
    return tuple(
        Recompute(mode=mode, blocks=compact_names(name for name in every if name in members))
        for mode, members in recomputed.items()
        if members
    )
