"""Shardings that the integer program finds run as they are: legal, equal to one process, with the collectives predicted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import msgspec
import pytest
import torch
from cases import ASSETS, graph_of, hand_cluster, source_of
from pool import RankPool, this_rank

from meshwright.core.cluster import Cluster, Link
from meshwright.core.collective import Collective
from meshwright.core.graph import Graph, Precision
from meshwright.core.names import expand_names
from meshwright.core.plan import BlockSharding, Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import Estimator, estimate
from meshwright.cost.local_block import make_local_blocks
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.measure.parity import ParityResult, compare
from meshwright.measure.record import StepRecorder
from meshwright.rules.plain_plan import plain_plan
from meshwright.rules.sharding import plain_sharding
from meshwright.runtime.apply import apply
from meshwright.searching.sharding.best_sharding import best_sharding

Pools = Callable[[int], RankPool]

MODELS = {
    "gpt": "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=60",
    "llama": "llama:layers=2,hidden=32,heads=4,kv_heads=2,intermediate=48,seq=16,vocab=60",
    "bert": "bert:layers=2,hidden=32,heads=4,seq=16,vocab=64",
    "t5": "t5:layers=2,hidden=32,heads=4,head_width=8,intermediate=48,seq=16,vocab=64,gated=true,tied=false",
    "vit": "vit:layers=2,hidden=32,heads=4,image=16,patch=4,classes=12",
    "resnet": "resnet:depth=26,image=64,classes=4000,channels=8",
    "mlp": "mlp:layers=2,inputs=24,hidden=32,classes=12",
    "coatnet": "coatnet:blocks=2-2-2-2-2,channels=8-8-16-32-64,head_width=8,image=64,classes=12",
}
HUGGING_FACE = {f"hf-{name}": f"hf:{ASSETS}/{name}-tiny.json" for name in ("gpt2", "llama", "bert", "t5", "vit")}
MICROBATCH = 2


def linked(bytes_per_second: float) -> Cluster:
    link = Link(bytes_per_second=bytes_per_second, latency_seconds=1e-7, origin="assumed")
    return msgspec.structs.replace(hand_cluster(2), intra_host=link)


FAST, SLOW = 1e13, 1e6
"""Bytes per second between two slow devices."""


@cache
def found(model: str, speed: float = FAST, sequence_parallel: bool = False) -> tuple[BlockSharding, ...]:
    best = best_sharding(
        graph_of(name_of(model), "fp64"), linked(speed), tp=2, microbatch=MICROBATCH, num_microbatches=2,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return best.sharding if best else ()


def name_of(model: str) -> str:
    return {**MODELS, **HUGGING_FACE}[model]


def plan_with(
    model: str, sharding: tuple[BlockSharding, ...], precision: Precision = "fp64", sequence_parallel: bool = False
) -> Plan:
    wish = PlanRequest(
        tp=2,
        microbatch=MICROBATCH,
        global_batch=2 * MICROBATCH,
        precision=precision,
        sequence_parallel=sequence_parallel,
    )
    plan = plain_plan(wish, graph_of(name_of(model), precision), 2, "tests")
    return msgspec.structs.replace(plan, sharding=sharding)


def in_one_run(sharding: tuple[BlockSharding, ...]) -> tuple[BlockSharding, ...]:
    """Without the runs that the runtime finds: a graph does not show that a weight is a fused query, key and value."""
    return tuple(
        msgspec.structs.replace(rule, tensors=tuple(msgspec.structs.replace(t, runs=1) for t in rule.tensors))
        for rule in sharding
    )


def split_blocks(sharding: tuple[BlockSharding, ...]) -> set[str]:
    return {name for rule in sharding for name in expand_names(rule.for_blocks)}


@pytest.mark.parametrize("model", [*MODELS, *HUGGING_FACE])
def test_what_is_found_is_legal_as_it_is(model: str) -> None:
    sharding = found(model)
    assert split_blocks(sharding) >= set(graph_of(name_of(model), "fp64").repeated_blocks[-1:]), (
        "its last block is split"
    )
    tried = try_sharding(plan_with(model, sharding), source_of(name_of(model)))
    assert in_one_run(tried.sharding) == sharding


@pytest.mark.parametrize("model", [*MODELS, *HUGGING_FACE])
def test_the_program_minimises_what_is_costed(model: str) -> None:
    graph: Graph = graph_of(name_of(model), "fp64")
    result = best_sharding(graph, linked(FAST), tp=2, microbatch=MICROBATCH)
    assert result is not None
    plan = plan_with(model, result.sharding)
    plan = msgspec.structs.replace(plan, num_microbatches=1, global_batch=MICROBATCH)
    parts = estimate(graph, plan, linked(FAST)).time_seconds
    costed = parts.forward + parts.backward + parts.exposed_inner + parts.update
    assert result.seconds == pytest.approx(costed, rel=1e-12)


@pytest.mark.parametrize("model", [*MODELS, *HUGGING_FACE])
def test_it_costs_no_more_than_the_plain_sharding(model: str) -> None:
    graph: Graph = graph_of(name_of(model), "fp64")
    plain = try_sharding(plan_with(model, plain_sharding(graph)), source_of(name_of(model)))
    for speed in (FAST, SLOW):
        sharding, cluster = found(model, speed), linked(speed)
        if sharding:
            ours = estimate(graph, plan_with(model, sharding), cluster).step_seconds
            assert ours <= estimate(graph, plain, cluster).step_seconds * (1 + 1e-9)


def test_convolutions_stay_whole_before_a_split_head_over_a_slow_link() -> None:
    assert split_blocks(found("resnet", SLOW)) == {"head"}
    whole = make_local_blocks(graph_of(name_of("resnet"), "fp64"), plan_with("resnet", found("resnet", SLOW)))[
        "stages.0.0"
    ]
    assert set(whole.labels.results) == {"whole"}


# ---------------------------------------------------------------- as it runs


CASES = [
    ("gpt", FAST, False), ("gpt", FAST, True), ("mlp", FAST, False), ("resnet", SLOW, False), ("resnet", FAST, False),
    ("coatnet", FAST, False), ("t5", FAST, False), ("vit", FAST, False), ("bert", FAST, False),
    ("llama", FAST, False),
]  # fmt: skip


def compare_on_rank(name: str, plan: Plan) -> ParityResult:
    return compare(source_of(name), plan, 2, this_rank())


def record_on_rank(name: str, plan: Plan) -> tuple[Collective, ...]:
    torch.manual_seed(0)
    source = source_of(name)
    program = apply(
        source.build(), plan, optimizer=partial(torch.optim.SGD, lr=1e-3), objective=source.objective,
        recorder=StepRecorder(), device=this_rank().device,
    )  # fmt: skip
    assert source.example is not None
    for _ in range(4):
        program.step(source.example(plan.global_batch))
    return program.trace().collectives


@pytest.mark.parametrize(("model", "speed", "tokens"), CASES, ids=str)
def test_it_agrees_with_one_process_and_calls_what_was_predicted(
    pool: Pools, model: str, speed: float, tokens: bool
) -> None:
    name = name_of(model)
    sharding = found(model, speed, tokens)
    plan = try_sharding(plan_with(model, sharding, sequence_parallel=tokens), source_of(name))
    assert in_one_run(plan.sharding) == sharding
    for result in pool(2).run(compare_on_rank, name, plan):
        assert result.ok, result.first_difference
    single = plan_with(model, plan.sharding, "fp32", tokens)
    estimator = Estimator(graph_of(name, "fp32"), single, hand_cluster(2), Recipe(optimizer_slots=0))
    for observed in pool(2).run(record_on_rank, name, single):
        assert by_call(observed) == by_call(estimator.collectives(0))


def by_call(rows: tuple[Collective, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.kind, row.axis): (row.count, row.total_bytes) for row in rows}
