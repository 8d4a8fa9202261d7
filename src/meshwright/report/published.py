"""A published run in our own words: which model, captured how, under which plan and recipe.

Systems differ in what they keep and when they communicate. What a table's rows leave unsaid is known of the system that made
it, and written down here once a system, never a row:

    Megatron, DeepSpeed    16-bit parameters and gradients with an fp32 master and Adam; explicit attention with fused
                           softmax; transfers between stages that both sides wait for
    DeepSpeed              its default buckets of 5e8 elements, one to reduce and one to gather; all-reduce, then all-gather
    BigScience's DeepSpeed also launches kernels one by one (CUDA_LAUNCH_BLOCKING in its scripts)
    FSDP                   fp32 shards, gathered and reduced in 16 bits; fused attention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.core.graph import Casting, Graph
from meshwright.core.plan import Plan, ScheduleKind
from meshwright.core.published import Run
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest, plain_plan

System = Literal["deepspeed", "megatron", "fsdp", "torchtitan"]

SYSTEMS: dict[str, System] = {
    "tr11": "deepspeed", "sc21-table1": "megatron", "mosaicml-fsdp": "fsdp", "torchtitan-llama3": "torchtitan",
}  # fmt: skip

RECIPES: dict[System, Recipe] = {
    "deepspeed": Recipe(
        fused_update=True, parameter_item_bytes=2, gradient_item_bytes=2, master_item_bytes=8, reduces_whole=True,
        blocking_transfers=True, overlaps_reduction=False, copies_received=True, fused_ops=True,
        blocking_launches=True, bucket_bytes=2 * 500_000_000 * 2,
    ),
    "megatron": Recipe(
        fused_update=True, parameter_item_bytes=2, gradient_item_bytes=2, master_item_bytes=4, whole_transfers=False,
        blocking_transfers=True, overlaps_reduction=False, fused_ops=True,
    ),
    "fsdp": Recipe(gather_item_bytes=4, reduce_item_bytes=2, fused_loss=True),
    "torchtitan": Recipe(fused_update=True, gather_item_bytes=2, reduce_item_bytes=4, selective_ops=True, plain_loss=True),
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """What a run is to us, before its model is captured."""

    model: str
    casting: Casting
    request: PlanRequest
    recipe: Recipe


def system_of(run: Run) -> System:
    """The system that made a run; of an unknown table, the one whose ways the row shows."""
    if run.source_table in SYSTEMS:
        return SYSTEMS[run.source_table]
    if "deepspeed" in run.schedule.lower():
        return "deepspeed"
    return "megatron" if run.tp > 1 or run.pp > 1 or run.zero < 2 else "fsdp"


def read(run: Run) -> Reading:
    system = system_of(run)
    explicit = system in ("deepspeed", "megatron")
    return Reading(
        model=model_of(run, "eager" if explicit else "sdpa"),
        casting="parameters",
        request=_request(run),
        recipe=_recipe(run, system),
    )


def model_of(run: Run, attention: str) -> str:
    if "llama" in run.model.lower():
        kv_heads, wide = (8, 14336) if run.hidden == 4096 else (run.heads, round(run.hidden * 8 / 3 / 256) * 256)
        return (
            f"llama:layers={run.layers},hidden={run.hidden},heads={run.heads},kv_heads={kv_heads},intermediate={wide},"
            f"seq={run.seq},vocab={run.vocab}"
        )
    return (
        f"gpt:layers={run.layers},hidden={run.hidden},heads={run.heads},seq={run.seq},vocab={run.vocab},tied=true,"
        f"attention={attention}"
    )


def plan_of(reading: Reading, graph: Graph, cluster: str) -> Plan:
    wish = reading.request
    world = (wish.tp or 1) * (wish.pp or 1) * (wish.dp or 1)
    return plain_plan(wish, graph, world, cluster)


def _request(run: Run) -> PlanRequest:
    schedule: ScheduleKind = "interleaved" if run.vpp > 1 else "1f1b"
    return PlanRequest(
        tp=run.tp, pp=run.pp, dp=run.dp, virtual=run.vpp, zero=run.zero if run.dp > 1 else 0,
        sequence_parallel=run.sequence_parallel and run.tp > 1, microbatch=run.micro_batch, global_batch=run.global_batch,
        schedule=schedule, recompute=run.recompute, precision="bf16", compile=run.compiled,
    )  # fmt: skip


def _recipe(run: Run, system: System) -> Recipe:
    import msgspec

    recipe = RECIPES[system]
    if system == "fsdp" and "PURE" in run.notes:
        return msgspec.structs.replace(recipe, gather_item_bytes=2)
    if system == "deepspeed" and run.precision == "bf16":  # its bf16 optimizer sums gradients in fp32
        return msgspec.structs.replace(recipe, gradient_item_bytes=8, reduce_item_bytes=4, master_item_bytes=4)
    return recipe
