"""A published run in our own words: which model, captured how, under which plan and recipe.

Systems differ in what they keep and when they communicate. What a table's rows leave unsaid is known of the system that made
it, and written down here once a system, never a row:

    Megatron, DeepSpeed    16-bit parameters and gradients with an fp32 master and Adam; explicit attention with fused
                           softmax; transfers between stages that both sides wait for
    DeepSpeed              its default buckets of 5e8 elements, one to reduce and one to gather; all-reduce, then all-gather
    BigScience's DeepSpeed also launches kernels one by one (CUDA_LAUNCH_BLOCKING in its scripts)
    FSDP                   fp32 shards, gathered and reduced in 16 bits; fused attention

16 bits are bf16 where the device has it, whatever a row says: fp16 has the same peak there, and a model is captured once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from meshwright.core.cluster import Facts
from meshwright.core.graph import Casting, Graph, Precision
from meshwright.core.plan import Plan, ScheduleKind
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.core.request import PlanRequest
from meshwright.interop.published import Run
from meshwright.rules.plain_plan import plain_plan

System = Literal["deepspeed", "megatron", "fsdp", "torchtitan"]

SYSTEMS: dict[str, System] = {
    "tr11": "deepspeed", "sc21-table1": "megatron", "mosaicml-fsdp": "fsdp", "torchtitan-llama3": "torchtitan",
}  # fmt: skip

WORDS: dict[str, System] = {
    "torchtitan": "torchtitan", "deepspeed": "deepspeed", "megatron": "megatron", "nemo": "megatron", "fsdp": "fsdp",
    "mosaic": "fsdp",
}  # fmt: skip
"""What a row of an unknown table may say of its system; the first that is found counts."""

LLAMAS: dict[tuple[int, bool], tuple[int, int]] = {
    (2048, True): (8, 8192), (3072, True): (8, 8192), (4096, True): (8, 14336), (8192, True): (8, 28672),
    (16384, True): (8, 53248), (8192, False): (8, 28672),
}  # fmt: skip
"""Hidden, and whether the vocabulary is Llama 3's → heads of keys and values, width of the MLP. Others follow Llama 1."""
LLAMA_3_VOCAB = 100_000
MISTRAL = (8, 14336)

LAUNCHED_ONE_BY_ONE = ("tr11",)
"""Tables whose published scripts set CUDA_LAUNCH_BLOCKING."""

TRAINING_SYSTEMS: dict[System, TrainingSystem] = {
    "deepspeed": TrainingSystem(
        parameter_item_bytes=2, gradient_item_bytes=2, master_item_bytes=8, reduces_whole=True,
        blocking_transfers=True, overlaps_reduction=False, copies_received=True, fused_ops=True,
        bucket_bytes=2 * 500_000_000 * 2, selective="selective core", whole_recompute=True,
    ),
    "megatron": TrainingSystem(
        parameter_item_bytes=2, gradient_item_bytes=2, master_item_bytes=4, whole_transfers=False,
        blocking_transfers=True, overlaps_reduction=False, fused_ops=True, selective="selective core",
        whole_recompute=True,
    ),
    "fsdp": TrainingSystem(
        gather_item_bytes=4, reduce_item_bytes=2, loss="fused", selective="selective core", whole_recompute=True,
    ),
    "torchtitan": TrainingSystem(
        gather_item_bytes=2, reduce_item_bytes=4, loss="plain", selective="selective ops", whole_recompute=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """What a run is to us, before its model is captured."""

    model: str
    precision: Precision
    casting: Casting
    num_ranks: int
    request: PlanRequest
    recipe: Recipe


def system_of(run: Run) -> System:
    """The system that made a run; of an unknown table, the one whose ways the row shows."""
    if run.source_table in SYSTEMS:
        return SYSTEMS[run.source_table]
    said = " ".join((run.source_table, run.schedule, run.source, run.notes)).casefold()
    for word, system in WORDS.items():
        if word in said:
            return system
    if run.compiled and run.zero == 3:
        return "torchtitan"
    return "megatron" if run.tp > 1 or run.pp > 1 or run.zero < 2 else "fsdp"


def precision_of(run: Run, facts: Facts) -> Precision:
    """What a run computes in, on the devices these facts describe."""
    said = run.precision.casefold()
    if "16" not in said and any(word in said for word in ("fp32", "tf32", "float32")):
        return "fp32"
    return "bf16" if facts.peak_bf16_tflops else "fp16"


def read(run: Run, facts: Facts) -> Reading:
    system, precision = system_of(run), precision_of(run, facts)
    explicit = system in ("deepspeed", "megatron")
    return Reading(
        model=model_of(run, "eager" if explicit else "sdpa"),
        precision=precision,
        casting="parameters",
        num_ranks=run.num_gpus,
        request=_request(run, precision),
        recipe=Recipe(system=_training_system(run, system, precision)),
    )


def model_of(run: Run, attention: str) -> str:
    if any(name in run.model.casefold() for name in ("llama", "mistral")):
        kv_heads, wide = _llama_sizes(run)
        return (
            f"llama:layers={run.layers},hidden={run.hidden},heads={run.heads},kv_heads={kv_heads},intermediate={wide},"
            f"seq={run.seq},vocab={run.vocab}"
        )
    return (
        f"gpt:layers={run.layers},hidden={run.hidden},heads={run.heads},seq={run.seq},vocab={run.vocab},tied=true,"
        f"attention={attention}"
    )


def _llama_sizes(run: Run) -> tuple[int, int]:
    """Heads of keys and values, and the MLP's width: 8/3 of hidden, up to a multiple of 256, where no table says."""
    if "mistral" in run.model.casefold() and run.hidden == 4096:
        return MISTRAL
    plain = (run.heads, -(-8 * run.hidden // (3 * 256)) * 256)
    return LLAMAS.get((run.hidden, run.vocab >= LLAMA_3_VOCAB), plain)


def plan_of(reading: Reading, graph: Graph, cluster: str) -> Plan:
    return plain_plan(reading.request, graph, reading.num_ranks, cluster)


def _request(run: Run, precision: Precision) -> PlanRequest:
    schedule: ScheduleKind = "interleaved" if run.vpp > 1 else "1f1b"
    return PlanRequest(
        tp=run.tp, pp=run.pp, dp=run.dp, virtual=run.vpp, zero=run.zero if run.dp > 1 else 0,
        sequence_parallel=run.sequence_parallel and run.tp > 1, microbatch=run.micro_batch, global_batch=run.global_batch,
        schedule=schedule, recompute=run.recompute, precision=precision, compile=run.compiled,
    )  # fmt: skip


def _training_system(run: Run, name: System, precision: Precision) -> TrainingSystem:
    system = msgspec.structs.replace(TRAINING_SYSTEMS[name], blocking_launches=run.source_table in LAUNCHED_ONE_BY_ONE)
    if precision == "fp32":  # one copy of everything, as Meshwright's own
        return msgspec.structs.replace(
            system, parameter_item_bytes=None, gradient_item_bytes=None, master_item_bytes=0, gather_item_bytes=None,
            reduce_item_bytes=None,
        )  # fmt: skip
    if name == "fsdp" and "PURE" in run.notes:
        return msgspec.structs.replace(system, gather_item_bytes=2)
    if name == "deepspeed" and run.precision == "bf16":  # its bf16 optimizer sums gradients in fp32
        return msgspec.structs.replace(system, gradient_item_bytes=8, reduce_item_bytes=4, master_item_bytes=4)
    return system
