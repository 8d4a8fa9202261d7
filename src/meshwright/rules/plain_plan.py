"""The plan of a request where nothing is searched: plain defaults for all that is open."""

from __future__ import annotations

from math import prod

from meshwright.core.axes import RANK_AXES
from meshwright.core.errors import PlanError
from meshwright.core.graph import Graph
from meshwright.core.names import compact_names
from meshwright.core.plan import Mesh, Offload, Plan, Recompute
from meshwright.core.request import PlanRequest, parse_recompute
from meshwright.rules.context import context_way
from meshwright.rules.divisors import near_divisors
from meshwright.rules.sharding import plain_sharding
from meshwright.rules.stages import even_stages, plain_virtual
from meshwright.rules.tokens import token_names


def recompute_rules(text: str, blocks: tuple[str, ...]) -> tuple[Recompute, ...]:
    """The flag's words as rules over the repeated blocks; `every:K` recomputes blocks 0, K, 2K, …"""
    mode, stride = parse_recompute(text)
    if mode == "none":
        return ()
    if not blocks:
        raise PlanError(f"recompute '{text}' is for repeated blocks, and the model has none: leave it out")
    return (Recompute(mode="selective" if mode == "selective" else "full", blocks=compact_names(blocks[::stride])),)


def plain_plan(request: PlanRequest, graph: Graph, world: int, cluster: str) -> Plan:
    """The request with plain defaults: all ranks data parallel, one microbatch, nothing sharded or recomputed."""
    mesh = plain_mesh(request, world)
    global_batch = request.global_batch or (request.microbatch or 1) * mesh.dp
    microbatch = request.microbatch or share_of_batch(global_batch, mesh.dp)
    schedule = request.schedule or "1f1b"
    virtual = request.virtual or plain_virtual(schedule)
    # a model that asks for activation checkpointing itself gets the plan's in its place; streamed blocks are recomputed anyway
    uses_own = graph.own_recompute and graph.repeated_blocks and request.offload != "parameters"
    own_recompute = "full" if uses_own else "none"
    return Plan(
        model=graph.model,
        graph=graph.identity,
        cluster=cluster,
        mesh=mesh,
        stages=even_stages(graph, mesh.pp, virtual, schedule, request.ends or "even"),
        sharding=plain_sharding(graph, mesh.tp) if mesh.tp > 1 else (),
        sequence_parallel=bool(request.sequence_parallel),
        context=request.context or context_way(graph, mesh.tp, mesh.cp),
        token_blocks=token_names(graph, mesh.cp),
        zero=request.zero or 0,
        hybrid=request.hybrid,
        recompute=recompute_rules(request.recompute or own_recompute, graph.repeated_blocks),
        offload=_plain_offload(request),
        schedule=schedule,
        virtual=virtual,
        microbatch=microbatch,
        num_microbatches=count_microbatches(global_batch, mesh.dp, microbatch),
        global_batch=global_batch,
        precision=request.precision or graph.precision,
        compile=bool(request.compile),
        sync_batch_norm=bool(request.sync_batch_norm),
    )


def _plain_offload(request: PlanRequest) -> Offload:
    how = (request.offload_share, request.offload_moments, request.offload_delayed or None)
    if request.offload is None and any(answer is not None for answer in how):
        raise PlanError("offload_share, offload_moments and offload_delayed need a kind of offload: set offload too")
    return request.offloading()


def plain_mesh(request: PlanRequest, world: int) -> Mesh:
    """The requested degrees; an open dp takes the ranks the other axes leave."""
    degrees = {axis: degree or 1 for axis, degree in request.degrees.items()}
    if request.dp is None:
        others = prod(degrees[axis] for axis in RANK_AXES)
        if world % others:
            raise PlanError(
                f"pp · cp · tp = {others} does not divide {world} ranks: change a degree or the number of ranks"
            )
        degrees["dp"] = world // others
    mesh = Mesh(**degrees)
    if mesh.world != world:
        words = " · ".join(f"{axis} {degrees[axis]}" for axis in RANK_AXES)
        raise PlanError(
            f"the plan needs {words} = {mesh.world} ranks, but there are {world}: change a degree, or run {mesh.world} ranks"
        )
    return mesh


def share_of_batch(global_batch: int, dp: int) -> int:
    """Samples per dp rank and step."""
    if global_batch % dp:
        below = global_batch - global_batch % dp
        near = f"{below} or {below + dp}" if below else f"{dp}"
        raise PlanError(f"global batch {global_batch} does not divide over dp={dp} ranks: use {near}")
    return global_batch // dp


def count_microbatches(global_batch: int, dp: int, microbatch: int) -> int:
    """How many microbatches one rank runs in a step."""
    share = share_of_batch(global_batch, dp)
    if share % microbatch:
        near = " or ".join(map(str, near_divisors(share, microbatch)))
        raise PlanError(
            f"each of {dp} ranks has {share} samples of the global batch {global_batch}, which do not divide into "
            f"microbatches of {microbatch}: use {near}"
        )
    return share // microbatch
