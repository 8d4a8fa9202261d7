"""A PlanRequest: the parts of a plan a person has fixed, by flags or in a file. What is open is `None`.

The search fills what is open; where nothing is searched, `plain_plan` takes the plain default for it.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from meshwright.core.bounds import Degree, Samples, Share
from meshwright.core.codec import Value, check_fields
from meshwright.core.context import context_way
from meshwright.core.divisors import near_divisors
from meshwright.core.errors import InputError, PlanError
from meshwright.core.graph import Graph, Precision
from meshwright.core.names import compact_names
from meshwright.core.plan import ContextWay, Mesh, Offload, Plan, Recompute, ScheduleKind, ZeroStage
from meshwright.core.sharding import plain_sharding
from meshwright.core.stages import even_stages, plain_virtual
from meshwright.core.tokens import token_names

_EVERY = re.compile(r"every:([1-9]\d*)")


class PlanRequest(Value, kw_only=True):
    """Field names are the plan flags' names."""

    dp: Degree | None = None
    tp: Degree | None = None
    pp: Degree | None = None
    cp: Degree | None = None
    ep: Degree | None = None
    virtual: Degree | None = None
    zero: ZeroStage | None = None
    hybrid: Degree | None = None
    sequence_parallel: bool | None = None
    context: ContextWay | None = None
    microbatch: Samples | None = None
    global_batch: Samples | None = None
    schedule: ScheduleKind | None = None
    recompute: str | None = None
    precision: Precision | None = None
    offload: str | None = None
    offload_share: Share | None = None
    """Of what is offloaded; without it, all of it."""
    offload_moments: Literal["fp32", "bf16"] | None = None
    """What Adam's moments are kept in where they are offloaded; without it, fp32."""
    offload_delayed: bool | None = None
    """Whether updates on the host may be a step late."""
    compile: bool | None = None
    sync_batch_norm: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, InputError)
        if self.recompute is not None:
            parse_recompute(self.recompute)
        if self.offload not in (None, "none", "optimizer", "parameters"):
            raise InputError(f"offload '{self.offload}' is not one of none, optimizer, parameters")

    def offloading(self, what: str | None = None) -> Offload:
        """What leaves the device; what: where the request leaves it open."""
        kind = self.offload or what or "none"
        if kind == "none":
            return Offload()
        return Offload(
            what=kind,  # type: ignore[arg-type]
            share=1.0 if self.offload_share is None else self.offload_share,
            moments=self.offload_moments or "fp32",
            delayed=bool(self.offload_delayed),
        )

    def updated(self, other: PlanRequest) -> PlanRequest:
        """This request with everything the other one fixes."""
        fixed = {name: value for name, value in msgspec.structs.asdict(other).items() if value is not None}
        return msgspec.structs.replace(self, **fixed)


def parse_recompute(text: str) -> tuple[str, int]:
    """`none`, `selective`, `full` or `every:K` → mode and stride."""
    if text in ("none", "selective", "full"):
        return text, 1
    match = _EVERY.fullmatch(text)
    if match is None:
        raise InputError(f"recompute '{text}' is not one of none, selective, full, every:K (such as every:2)")
    return "full", int(match[1])


def recompute_rules(text: str, blocks: tuple[str, ...]) -> tuple[Recompute, ...]:
    """The flag's words as rules over the repeated blocks; `every:K` recomputes blocks 0, K, 2K, …"""
    mode, stride = parse_recompute(text)
    if mode == "none":
        return ()
    if not blocks:
        raise PlanError(f"recompute '{text}' redoes repeated blocks, and the model has none: leave it out")
    return (Recompute(mode="selective" if mode == "selective" else "full", blocks=compact_names(blocks[::stride])),)


def plain_plan(request: PlanRequest, graph: Graph, world: int, cluster: str) -> Plan:
    """The request with plain defaults: all ranks data parallel, one microbatch, nothing sharded or recomputed."""
    mesh = plain_mesh(request, world)
    global_batch = request.global_batch or (request.microbatch or 1) * mesh.dp
    microbatch = request.microbatch or share_of_batch(global_batch, mesh.dp)
    schedule = request.schedule or "1f1b"
    virtual = request.virtual or plain_virtual(schedule)
    return Plan(
        model=graph.model,
        graph=graph.identity,
        cluster=cluster,
        mesh=mesh,
        stages=even_stages(graph, mesh.pp, virtual, schedule),
        sharding=plain_sharding(graph, mesh.tp) if mesh.tp > 1 else (),
        sequence_parallel=bool(request.sequence_parallel),
        context=request.context or context_way(graph, mesh.tp, mesh.cp),
        token_blocks=token_names(graph, mesh.cp),
        zero=request.zero or 0,
        hybrid=request.hybrid,
        recompute=recompute_rules(request.recompute or _plain_recompute(request, graph), graph.repeated_blocks),
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


def _plain_recompute(request: PlanRequest, graph: Graph) -> str:
    """A model that asks for activation checkpointing itself gets the plan's in its place; streamed blocks are redone anyway."""
    is_wanted = graph.own_recompute and graph.repeated_blocks and request.offload != "parameters"
    return "full" if is_wanted else "none"


def _plain_offload(request: PlanRequest) -> Offload:
    how = (request.offload_share, request.offload_moments, request.offload_delayed or None)
    if request.offload is None and any(answer is not None for answer in how):
        raise PlanError(
            "offload_share, offload_moments and offload_delayed say how to offload, but not what: set offload too"
        )
    return request.offloading()


def plain_mesh(request: PlanRequest, world: int) -> Mesh:
    """The requested degrees; an open dp takes the ranks the other axes leave."""
    others = (request.pp or 1) * (request.cp or 1) * (request.tp or 1)
    if request.dp is None and world % others:
        raise PlanError(
            f"pp · cp · tp = {others} does not divide {world} ranks: change a degree or the number of ranks"
        )
    mesh = Mesh(
        pp=request.pp or 1, dp=request.dp or world // others, cp=request.cp or 1, tp=request.tp or 1, ep=request.ep or 1
    )
    if mesh.world != world:
        raise PlanError(
            f"the plan needs pp {mesh.pp} · dp {mesh.dp} · cp {mesh.cp} · tp {mesh.tp} = {mesh.world} ranks, "
            f"but there are {world}: change a degree, or run {mesh.world} ranks"
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
