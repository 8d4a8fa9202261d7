"""What the cost model predicts of a step, against what the recorder saw: collectives and state to the byte, the peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from cases import RECOMPUTES, ZERO_STAGES, Case, graph_of, hand_cluster, plan_of, source_of
from pool import RankPool, this_rank

from meshwright.core.collective import Collective, total
from meshwright.core.estimate import Estimate, MemoryParts, TimeParts
from meshwright.core.graph import Precision
from meshwright.core.recipe import Recipe
from meshwright.core.run.trace import Trace
from meshwright.cost.estimate import estimate
from meshwright.measure.record import StepRecorder
from meshwright.rules.downsampling import MOST_POINTS
from meshwright.runtime.apply import apply
from meshwright.runtime.optimizer import OptimizerFactory
from meshwright.runtime.program import Program
from meshwright.runtime.step import StepOutput
from meshwright.runtime.watch import SAMPLED_STEP, Recorder, Sample

Pools = Callable[[int], RankPool]

NUM_STEPS = 4
PLANS = list(product(ZERO_STAGES, (1, 2), RECOMPUTES))


@dataclass(frozen=True)
class Seen:
    """Predicted and observed, on one rank."""

    predicted: Estimate
    trace: Trace


RECIPES: dict[str, tuple[OptimizerFactory, Recipe]] = {
    "momentum": (
        partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        Recipe(optimizer_slots=1, optimizer_scalar_bytes=0, clips=True),
    ),
    "adam": (partial(torch.optim.AdamW, fused=True), Recipe(clips=True)),
}


def train_on_rank(case: Case, kind: str = "momentum") -> Seen:
    """Four clipped steps under the recorder."""
    optimizer, recipe = RECIPES[kind]
    rank, source, plan = this_rank(), source_of(case.model), plan_of(case)
    program = apply(
        source.build(), plan, optimizer=optimizer, objective=source.objective, max_norm=1.0, recorder=StepRecorder(),
        device=rank.device,
    )  # fmt: skip
    assert source.example is not None
    for _ in range(NUM_STEPS):
        program.step(source.example(plan.global_batch))
    predicted = estimate(graph_of(case.model, case.precision), plan, hand_cluster(rank.num_ranks), recipe)
    return Seen(predicted, program.trace())


@pytest.mark.parametrize(("zero", "num_microbatches", "recompute"), PLANS)
@pytest.mark.parametrize("model", ["gpt", "odd"])
def test_collectives_and_state(pool: Pools, model: str, zero: int, num_microbatches: int, recompute: str) -> None:
    """`odd` has no dim that divides by two: shards are padded, and rank 0 holds the larger ones."""
    check_collectives_and_state(pool(2), Case(model, zero, recompute, num_microbatches, "fp32"))


@pytest.mark.parametrize("zero", ZERO_STAGES)
@pytest.mark.parametrize("model", ["tied", "frozen", "resnet", "llama", "gpt2"])
def test_collectives_and_state_of_other_models(pool: Pools, model: str, zero: int) -> None:
    check_collectives_and_state(pool(2), Case(model, zero, "full" if zero % 2 else "none", 2, "fp32"))


@pytest.mark.parametrize(
    ("model", "zero"),
    [("bert", 3), ("t5", 0), ("t5", 3), ("vit", 1), ("coatnet", 2), ("mlp", 0), ("hf_bert", 1), ("hf_t5", 3), ("hf_vit", 2),
     ("mixtral", 3)],
)  # fmt: skip
def test_collectives_and_state_of_more_models(pool: Pools, model: str, zero: int) -> None:
    check_collectives_and_state(pool(2), Case(model, zero, "full" if zero % 2 else "none", 2, "fp32"))


@pytest.mark.parametrize("zero", ZERO_STAGES)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_collectives_and_state_in_other_precisions(pool: Pools, precision: Precision, zero: int) -> None:
    check_collectives_and_state(pool(2), Case("gpt", zero, "none", 2, precision))


@pytest.mark.parametrize(
    ("model", "num_buckets"),
    [
        ("gpt:layers=3,hidden=512,heads=4,seq=8,vocab=64", 3),
        ("gpt:layers=3,hidden=512,heads=4,seq=8,vocab=4096,tied=true", 3),
        ("resnet:depth=26,image=32,classes=10,channels=40", 2),
    ],
)
def test_replicas_reduce_in_buckets(pool: Pools, model: str, num_buckets: int) -> None:
    """Larger than one bucket: replicas close the first at 1 MiB and the others at 25 MiB."""
    (seen, _) = pool(2).run(train_on_rank, Case(model, 0, "none", 1, "fp32", samples=2))
    assert seen.trace.collectives == seen.predicted.collectives
    (all_reduces,) = seen.trace.collectives
    assert all_reduces.count == num_buckets + 2


def test_buckets_follow_the_order_of_gradients(pool: Pools) -> None:
    """torch makes its buckets anew after the first step, in the order in which gradients became ready."""
    (seen, _) = pool(2).run(train_on_rank, Case("head_first", 0, "none", 1, "fp32"))
    assert seen.trace.collectives == seen.predicted.collectives


def test_collectives_and_state_of_four_ranks(pool: Pools) -> None:
    check_collectives_and_state(pool(4), Case("odd", 0, "none", 1, "fp32"))
    check_collectives_and_state(pool(4), Case("odd", 3, "full", 2, "fp32"))


def test_one_rank_calls_no_collective(pool: Pools) -> None:
    (seen,) = pool(1).run(train_on_rank, Case("odd", 0, "none", 2, "fp32"))
    assert seen.trace.collectives == seen.predicted.collectives == ()
    check_collectives_and_state(pool(1), Case("odd", 3, "none", 1, "fp32"))


def check_collectives_and_state(ranks: RankPool, case: Case) -> None:
    every = ranks.run(train_on_rank, case)
    for seen in every:
        assert [record.sampled for record in seen.trace.steps] == [i == SAMPLED_STEP for i in range(NUM_STEPS)]
        assert seen.trace.collectives == seen.predicted.collectives
    worst = every[0].trace.memory_bytes
    assert worst is not None
    predicted = every[0].predicted.memory_bytes
    assert worst.parameters == predicted.parameters
    assert worst.optimizer_state == predicted.optimizer_state
    assert worst.inputs == predicted.inputs
    assert worst.total == every[0].trace.peak_bytes


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_state_of_adam(pool: Pools, zero: int) -> None:
    """Two slots a parameter, and the step count that Adam keeps beside them."""
    (seen, _) = pool(2).run(train_on_rank, Case("odd", zero, "none", 1, "fp32"), "adam")
    assert seen.trace.collectives == seen.predicted.collectives
    assert seen.trace.memory_bytes is not None
    assert seen.trace.memory_bytes.optimizer_state == seen.predicted.memory_bytes.optimizer_state


def test_collectives_of_zero_3_by_hand(pool: Pools) -> None:
    """Both sides above might be wrong together: one case is counted on paper.

    `odd`: per layer norm 7+7, up 15·7+15, down 7·15+7 (246 numbers); the rest scale 7, enter 7·3+7, leave 5·7+5.
    A shard of d rows holds ceil(d / 2) of them: layer 4+4 + 8·7+8 + 4·15+4 = 136; rest 4 + 4·3+4 + 3·7+3 = 44.
    """
    (seen, _) = pool(2).run(train_on_rank, Case("odd", 3, "none", 2, "fp32"))
    layer, rest, microbatches = 136 * 4, 44 * 4, 2
    assert seen.trace.collectives == (
        Collective(
            kind="all_gather", axis="dp", count=microbatches * (2 * 3 + 1),
            total_bytes=microbatches * (2 * 3 * layer + rest),
        ),
        Collective(kind="all_reduce", axis="dp", count=3, total_bytes=8 + 32 + 8),
        Collective(
            kind="reduce_scatter", axis="dp", count=microbatches * 4,
            total_bytes=2 * microbatches * (3 * layer + rest),
        ),
    )  # fmt: skip


BROAD = "gpt:layers=4,hidden=64,heads=4,seq=128,vocab=256"


BY_CATEGORY = [
    *((zero, m, recompute, "fp32") for zero, m, recompute in product(ZERO_STAGES, (1, 4), RECOMPUTES)),
    *((0, m, "none", "bf16") for m in (1, 4)),
]
MEASURED_WITHIN = 0.02
"""Share of the measured peak by which a category may be off."""


@pytest.mark.parametrize(("zero", "num_microbatches", "recompute", "precision"), BY_CATEGORY)
def test_memory_by_category(
    pool: Pools, zero: int, num_microbatches: int, recompute: str, precision: Precision
) -> None:
    check_categories(pool(2), Case(BROAD, zero, recompute, num_microbatches, precision, samples=16))


def check_categories(ranks: RankPool, case: Case) -> None:
    """At the peak. Activations, temporaries and buffers count together: a graph of segments knows no finer moments."""
    for seen in ranks.run(train_on_rank, case, "adam"):
        measured, predicted = seen.trace.memory_bytes, seen.predicted.memory_bytes
        assert measured is not None
        for names in (
            ("parameters",), ("optimizer_state",), ("inputs",), ("gradients",), ("gathered_parameters",),
            ("activations", "temporaries", "communication_buffers"),
        ):  # fmt: skip
            one, other = (sum(getattr(parts, name) for name in names) for parts in (predicted, measured))
            assert abs(one - other) <= MEASURED_WITHIN * measured.total, (
                f"{' and '.join(names)}: predicted {predicted}, measured {measured}"
            )


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_memory_over_time_and_time_by_part(pool: Pools, zero: int) -> None:
    case = Case(BROAD, zero, "full", 2, "fp32", samples=4)
    (seen, _) = pool(2).run(train_on_rank, case, "adam")
    trace = seen.trace
    totals = [point.memory_bytes.total for point in trace.memory_over_time]
    assert max(totals) == trace.peak_bytes
    assert len(totals) <= MOST_POINTS
    moments = [point.at_seconds for point in trace.memory_over_time]
    assert moments == sorted(moments)
    check_compute_stream(trace)
    check_collectives_in_the_timeline(trace)
    parts = trace.time_seconds
    assert min(parts.forward, parts.recompute, parts.backward, parts.update) > 0
    assert parts.total == pytest.approx(trace.step_seconds, rel=0.2)


def check_compute_stream(trace: Trace) -> None:
    """Every part is there, and one ends before the next begins."""
    compute = [one for one in trace.timeline if one.stream == "compute"]
    assert {"forward", "recompute", "backward", "update"} <= {one.part for one in compute}
    for one, other in pairwise(compute):
        assert one.start_seconds + one.seconds <= other.start_seconds + 1e-9


def check_collectives_in_the_timeline(trace: Trace) -> None:
    """Each call that the recorder saw has run, with the same kind, axis and bytes."""
    ran = [one for one in trace.timeline if one.stream == "communication"]
    found = total(
        Collective(kind=one.part, axis=one.axis, count=1, total_bytes=one.num_bytes)  # type: ignore[arg-type]
        for one in ran
    )
    late = {"all_reduce"}  # the loss may still be on its way when the step is over
    assert [call for call in found if call.kind not in late] == [
        call for call in trace.collectives if call.kind not in late
    ]
    counted = {(one.part, one.axis): one.count for one in trace.part_seconds if one.stream == "communication"}
    assert counted == {(call.kind, call.axis): call.count for call in found}


class CountingRecorder:
    """Records nothing, in no time: the watch then wants to see every step."""

    def record(self, program: Program, batch: Any, run: Callable[[], StepOutput]) -> tuple[StepOutput, Sample]:
        return run(), Sample(TimeParts(), MemoryParts(), ())


def sampled_steps_on_rank(case: Case, patient: bool) -> tuple[list[bool], int, int]:
    """Which steps were sampled, and the number of hooks before the first and after the last step."""
    source, plan = source_of(case.model), plan_of(case)
    recorder: Recorder = StepRecorder() if patient else CountingRecorder()
    program = apply(source.build(), plan, optimizer=RECIPES["adam"][0], recorder=recorder, device=this_rank().device)
    assert source.example is not None
    before = num_hooks(program)
    for _ in range(6):
        program.step(source.example(plan.global_batch))
    return [record.sampled for record in program.trace().steps], before, num_hooks(program)


def num_hooks(program: Program) -> int:
    """On modules, parameters and the optimizer; torch keeps its own among them."""
    holders = (*program.spread_module.modules(), *program.module.parameters(), program.optimizer)
    return sum(len(found) for holder in holders for name, found in vars(holder).items() if "hooks" in name and found)


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_agree_on_which_steps_are_sampled(pool: Pools, zero: int) -> None:
    one, other = pool(2).run(sampled_steps_on_rank, Case("gpt", zero, "full", 2, "fp32"), False)
    assert one[0] == other[0]
    assert one[0][:3] == [False, False, True]


def test_nothing_is_left_between_samples(pool: Pools) -> None:
    """A recorder that costs more than a step waits long; ranks agree on how long, and its hooks are gone."""
    one, other = pool(2).run(sampled_steps_on_rank, Case("gpt", 0, "none", 1, "fp32"), True)
    assert one[0] == other[0] == [False, False, True, False, False, False]
    assert one[1] == one[2]


def test_unreduced_gradients_are_gradients(pool: Pools) -> None:
    """ZeRO 1 adds up whole gradients over microbatches: in the last one they are all there, at any moment."""
    (seen, _) = pool(2).run(train_on_rank, Case(BROAD, 1, "none", 4, "fp32", samples=16), "adam")
    whole = 4 * graph_of(BROAD).num_parameters
    last = [point for point in seen.trace.memory_over_time if point.memory_bytes.gradients == whole]
    assert len(last) > 10


@pytest.mark.parametrize(("zero", "num_microbatches", "recompute"), PLANS)
def test_peak_where_activations_dominate(pool: Pools, zero: int, num_microbatches: int, recompute: str) -> None:
    case = Case(BROAD, zero, recompute, num_microbatches, "fp32", samples=16)
    for seen in pool(2).run(train_on_rank, case, "adam"):
        measured, predicted = seen.trace.peak_bytes, seen.predicted.peak_bytes
        assert measured is not None
        assert seen.predicted.memory_bytes.activations > 0.5 * predicted or recompute == "full"
        assert predicted == pytest.approx(measured, rel=0.10), (
            f"predicted {seen.predicted.memory_bytes}, measured {seen.trace.memory_bytes}"
        )
