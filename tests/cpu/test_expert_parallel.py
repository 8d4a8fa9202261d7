"""Experts over ep: parity with one process, the collectives, what is dropped, and a router checked by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cases import ZERO_STAGES, Case, graph_of, hand_cluster, plan_of, source_of
from pool import RankError, RankPool, this_rank
from test_checkpoint import GLOBAL_BATCH, resume, run_and_save
from test_parity import check
from torch import Tensor, nn

from meshwright.core.cluster import CollectiveTime
from meshwright.core.collective import Collective, total
from meshwright.core.estimate import Estimate
from meshwright.core.recipe import Recipe
from meshwright.core.run.trace import Trace
from meshwright.cost.communication.links import Group, ring_seconds
from meshwright.cost.estimate import estimate
from meshwright.measure.links import link_of
from meshwright.measure.parity import ParityResult, Tamper, compare
from meshwright.measure.record import StepRecorder
from meshwright.models.experts import find_experts
from meshwright.models.moe import MoE, MoEOptions
from meshwright.models.objective import slice_batch
from meshwright.models.source import ModelSource
from meshwright.runtime.apply import apply
from meshwright.runtime.experts import expert_parameters_of
from meshwright.runtime.program import Program
from meshwright.training.metrics import dropped_tokens

Pools = Callable[[int], RankPool]

FOUR_RANKS = [
    Case("gshard", 0, "none", 2, ep=2),
    Case("gshard", 1, "full", 2, ep=2),
    Case("gshard", 2, "none", 1, ep=4),
    Case("gshard", 3, "full", 2, ep=4),
    Case("switch", 0, "full", 1, ep=4),
    Case("switch", 3, "none", 2, ep=2),
    Case("dropless", 2, "full", 2, ep=2),
    Case("dropless", 1, "none", 1, ep=4),
    Case("mixtral", 0, "full", 2, ep=2),
    Case("mixtral", 1, "none", 2, ep=4),
    Case("mixtral", 2, "full", 1, ep=4),
    Case("mixtral", 3, "none", 1, ep=2),
]
"""Every pair of (zero, recompute), (zero, ep) and every model is in some row."""
TWO_RANKS = [
    *(Case("gshard", zero, "full" if zero % 2 else "none", 2, ep=2) for zero in ZERO_STAGES),
    Case("gshard", 0, "none", 2),
    Case("switch", 3, "full", 2),
    Case("mixtral", 0, "full", 2, ep=2),
    Case("mixtral", 3, "none", 2),
]


def compare_on_rank(case: Case, num_steps: int, tamper: Tamper | None = None) -> ParityResult:
    return compare(source_of(case.model).small(), plan_of(case), num_steps, this_rank(), tamper)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_four_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    check(pool(4).run(compare_on_rank, case, 2))


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_two_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    check(pool(2).run(compare_on_rank, case, 2))


def skewed(source: ModelSource) -> ModelSource:
    """Every token chooses expert 0."""

    def build() -> nn.Module:
        module = source.build()
        for block in module.blocks:  # type: ignore[union-attr]
            nn.init.constant_(block.mlp_norm.bias, 3.0)
            nn.init.constant_(block.mlp.router.weight, -1.0)
            nn.init.constant_(block.mlp.router.weight[0], 1.0)
        return module

    return dataclasses.replace(source, build=build)


NARROW = "moe:layers=2,hidden=32,heads=4,seq=16,vocab=61,experts=4,top=1,capacity=0"


def compare_skewed(case: Case) -> tuple[ParityResult, bool]:
    program: list[Program] = []
    result = compare(skewed(source_of(case.model).small()), plan_of(case), 2, this_rank(), program.append)
    return result, bool(program[0].step is not None and received_any(program[0]))


def received_any(program: Program) -> bool:
    """Whether an optimizer step has moved this rank's experts away from zero moments."""
    moments = (program.optimizer.state[p]["exp_avg"] for p in expert_parameters_of(program.module).values())
    return any(bool(local.any()) for local in (getattr(m, "_local_tensor", m) for m in moments))


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_experts_that_nobody_chooses(pool: Pools, zero: int) -> None:
    """Ranks that receive no row take part in everything, with gradients of zero."""
    answers = pool(4).run(compare_skewed, Case(NARROW, zero, "full" if zero % 2 else "none", 2, ep=2))
    check([result for result, _ in answers])
    assert [chosen for _, chosen in answers][1::2] == [False, False]
    assert any(chosen for _, chosen in answers[0::2])


def scale_experts(program: Program) -> None:
    """Experts are averaged over the ep ranks that sent them tokens once too often."""
    parameters = list(expert_parameters_of(program.module).values())

    def spoil(*_: Any) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(program.plan.mesh.ep)

    program.optimizer.register_step_pre_hook(spoil)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_scaled_gradient_of_experts_is_found(pool: Pools, zero: int) -> None:
    for result in pool(4).run(compare_on_rank, Case("gshard", zero, ep=2), 1, scale_experts):
        assert not result.ok
        assert result.first_difference is not None
        assert result.first_difference.startswith("step 0: gradient of blocks.0.mlp.experts.expand differs by 0.5 ")


# What is refused.


def refused(case: Case) -> None:
    source = source_of(case.model)
    apply(source.build(), plan_of(case), optimizer=torch.optim.SGD, device=this_rank().device)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (NARROW.replace("experts=4", "experts=6"), "6 experts do not divide over ep=4: with dp=4 use 1, 2"),
        ("gpt", "ep=4, but the model has no experts"),
    ],
)
def test_experts_that_cannot_be_spread(pool: Pools, model: str, words: str) -> None:
    with pytest.raises(RankError) as caught:
        pool(4).run(refused, Case(model, ep=4))
    assert all(words in error for error in caught.value.errors.values())


def test_experts_are_known_by_their_structure() -> None:
    assert find_experts(source_of("mixtral").build()) == {f"model.layers.{n}.mlp.experts": 4 for n in range(2)}
    assert find_experts(source_of("dropless").build()) == {"blocks.1.mlp.experts": 4}
    for model in ("gpt", "resnet", "llama"):
        assert find_experts(source_of(model).build()) == {}


# Collectives, memory, norms.


@dataclasses.dataclass(frozen=True)
class Seen:
    predicted: Estimate
    trace: Trace
    dropped: int
    routed: int
    norm: float | None


def train_on_rank(case: Case, seed: int = 0) -> Seen:
    torch.manual_seed(seed)
    source, plan = source_of(case.model), plan_of(case)
    optimizer = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    program = apply(
        source.build(), plan, optimizer=optimizer, objective=source.objective, max_norm=0.5, recorder=StepRecorder(),
        device=this_rank().device,
    )  # fmt: skip
    assert source.example is not None
    outputs = [program.step(source.example(plan.global_batch)) for _ in range(3)]
    recipe = Recipe(optimizer_slots=1, optimizer_scalar_bytes=0, clips=True)
    predicted = estimate(graph_of(case.model, case.precision), plan, hand_cluster(plan.world), recipe)
    last = outputs[-1]
    return Seen(predicted, program.trace(), last.dropped_tokens, last.routed_tokens, last.gradient_norm)


COLLECTIVES = [
    *(Case("dropless", zero, "full" if zero % 2 else "none", 2, "fp32", ep=2) for zero in ZERO_STAGES),
    *(Case("mixtral", zero, "none" if zero % 2 else "full", 2, "fp32", ep=4) for zero in ZERO_STAGES),
    Case("dropless", 0, "none", 1, "bf16", ep=2),
]


@pytest.mark.parametrize("case", COLLECTIVES, ids=str)
def test_collectives_and_state(pool: Pools, case: Case) -> None:
    """What comes back from experts depends on the routing: bytes are compared over all ranks together, calls on each."""
    every = pool(4).run(train_on_rank, case)
    for seen in every:
        assert calls_of(seen.trace.collectives) == calls_of(seen.predicted.collectives)
    memory, predicted = (
        every[0].trace.memory_bytes,
        every[0].predicted.memory_bytes,
    )  # the first rank's shards are the largest
    assert memory is not None
    assert (memory.parameters, memory.optimizer_state) == (predicted.parameters, predicted.optimizer_state)
    assert total(row for seen in every for row in seen.trace.collectives) == total(
        row for seen in every for row in seen.predicted.collectives
    )
    assert every[0].dropped == 0


def calls_of(rows: tuple[Collective, ...]) -> dict[tuple[str, str], int]:
    return {(row.kind, row.axis): row.count for row in rows}


def test_dropped_choices_are_not_sent(pool: Pools) -> None:
    """Forward, backward, there and back: each dropped choice saves a row four times."""
    every = pool(4).run(train_on_rank, Case("gshard", 0, "none", 2, "fp32", ep=2))
    dropped, row_bytes = every[0].dropped, 32 * 4
    predicted, sent = (
        sum(row.total_bytes for seen in every for row in rows(seen) if row.kind == "all_to_all")
        for rows in (lambda seen: seen.predicted.collectives, lambda seen: seen.trace.collectives)
    )
    assert dropped > 0
    assert predicted - sent == 4 * dropped * row_bytes


def test_experts_larger_than_a_bucket(pool: Pools) -> None:
    model = "moe:layers=3,hidden=64,heads=4,seq=8,vocab=64,mlp=8,experts=8,top=2,capacity=0"
    seen, *_ = pool(4).run(train_on_rank, Case(model, 0, "none", 1, "fp32", samples=2, ep=2))
    assert calls_of(seen.trace.collectives)["all_reduce", "dp"] == 1 + 2 + 2, "one bucket, two of experts, two numbers"
    assert calls_of(seen.trace.collectives) == calls_of(seen.predicted.collectives)


@pytest.mark.parametrize("zero", [0, 2])
def test_the_norm_counts_every_expert_once(pool: Pools, zero: int) -> None:
    alone, *_ = pool(4).run(train_on_rank, Case("dropless", 0, "none", 1))
    for ep in (2, 4):
        for seen in pool(4).run(train_on_rank, Case("dropless", zero, "none", 1, ep=ep)):
            assert seen.norm == pytest.approx(alone.norm, rel=1e-12)


# Routing, by hand.


def routed_by_hand(layer: MoE, tokens: Tensor, room: float) -> tuple[Tensor, int]:
    """Loops over tokens and choices: what the layer gives, and how many choices found no room."""
    experts = layer.experts
    result, taken, dropped = torch.zeros_like(tokens), [0] * experts.num_experts, 0
    probabilities = [torch.softmax(layer.router.weight @ token, 0) for token in tokens]
    best = [sorted(range(len(p)), key=lambda e, p=p: -float(p[e]))[: layer.top] for p in probabilities]  # type: ignore[misc]
    for choice in range(layer.top):
        for n, token in enumerate(tokens):
            expert = best[n][choice]
            if taken[expert] >= room:
                dropped += 1
                continue
            taken[expert] += 1
            chosen = sum(float(probabilities[n][e]) for e in best[n]) if layer.top == 2 else 1.0
            made = experts.contract[expert] @ torch.nn.functional.gelu(experts.expand[expert] @ token)
            result[n] += float(probabilities[n][expert]) / chosen * made
    return result, dropped


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.0, 1.25])
def test_router_and_experts_by_hand(top: int, capacity: float) -> None:
    torch.manual_seed(3)
    layer = MoE(MoEOptions(hidden=8, heads=2, experts=5, top=top, capacity=capacity)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    room = math.ceil(capacity * 21 * top / 5) if capacity else math.inf
    with torch.no_grad():
        found, _ = layer(x)
        expected, dropped = routed_by_hand(layer, x.flatten(0, 1), room)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)
    assert layer.routed_tokens == 21 * top
    assert (0 if layer.dropped_tokens is None else int(layer.dropped_tokens)) == dropped
    assert (dropped > 0) == (capacity > 0)


def test_balance_by_hand() -> None:
    """Two experts; three of four tokens choose the first: 2 · (3/4 · mean p₀ + 1/4 · mean p₁)."""
    layer = MoE(MoEOptions(hidden=2, heads=1, experts=2, top=1))
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
    found = layer.unevenness(probabilities, probabilities.argmax(1, keepdim=True))
    assert float(found) == pytest.approx(2 * (0.75 * 0.65 + 0.25 * 0.35))
    even = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert float(layer.unevenness(even, even.argmax(1, keepdim=True))) == pytest.approx(1.0)


def dropped_on_rank(case: Case) -> tuple[int, int]:
    torch.manual_seed(0)
    source, plan = source_of(case.model), plan_of(case)
    program = apply(
        source.build(), plan, optimizer=torch.optim.SGD, objective=source.objective, device=this_rank().device
    )
    assert source.example is not None
    output = program.step(source.example(plan.global_batch))
    return output.dropped_tokens, output.routed_tokens


def test_dropped_tokens_of_a_step(pool: Pools) -> None:
    """One process runs each microbatch of each rank, and every layer's choices are dropped by hand; a forward that is redone is
    not counted twice."""
    case = Case("switch", 1, "full", 2, ep=2)
    every = pool(4).run(dropped_on_rank, case)
    torch.manual_seed(0)
    source = source_of("switch")
    module, expected = source.build().double(), 0
    assert source.example is not None
    batch = source.example(16)

    def count(layer: MoE, arguments: tuple[Tensor, ...]) -> None:
        nonlocal expected
        tokens = arguments[0].flatten(0, 1)
        expected += routed_by_hand(layer, tokens, math.ceil(len(tokens) / 4))[1]

    for layer in (part for part in module.modules() if isinstance(part, MoE)):
        layer.register_forward_pre_hook(count)
    with torch.no_grad():
        for start in range(0, 16, 2):
            module(slice_batch(batch, start, start + 2)["input_ids"])  # type: ignore[call-overload]
    assert set(every) == {(expected, 16 * 16 * 2)}
    assert expected > 0


def test_dropped_tokens_of_a_run(tmp_path: Path) -> None:
    lines = tmp_path / "metrics.jsonl"
    assert dropped_tokens(lines) == (0, 0)
    lines.write_text(
        '{"step": 0, "dropped_tokens": 3, "routed_tokens": 10}\n{"step": 1, "routed_tokens": 10}\n{"step": 1}\n'
    )
    assert dropped_tokens(lines) == (3, 20)


def test_a_measured_link_gives_the_measured_seconds() -> None:
    """A ring over it takes as long as the all-reduces it was made of; fewer ranks take less."""
    points = tuple(
        CollectiveTime(kind="all_reduce", num_ranks=4, num_bytes=size, seconds=seconds)
        for size, seconds in ((8, 6e-4), (2**20, 3e-3), (2**24, 4e-2))
    )
    cluster = msgspec.structs.replace(hand_cluster(4), intra_host=link_of(points))
    for size, seconds in ((8, 6e-4), (2**24, 4e-2)):
        assert ring_seconds("all_reduce", size, Group(4), cluster) == pytest.approx(seconds, rel=0.01)
        assert ring_seconds("all_to_all", size, Group(2), cluster) < seconds
    assert link_of(()) is None


# Checkpoints.


def saving(zero: int, ep: int, num_ranks: int = 4) -> Case:
    return Case("dropless", zero, "none", 1, "fp64", GLOBAL_BATCH // num_ranks, ep=ep)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (saving(0, 2), saving(0, 2)),
        (saving(3, 2), saving(3, 2)),
        (saving(0, 4), saving(2, 2)),
        (saving(1, 2), saving(0, 4)),
        (saving(3, 2), saving(0, 1)),
        (saving(0, 1), saving(3, 4)),
        (saving(2, 2), saving(1, 2, num_ranks=2)),
        (saving(0, 4), saving(0, 1, num_ranks=2)),
    ],
    ids=str,
)
def test_experts_go_on_from_a_checkpoint(pool: Pools, tmp_path: Path, saved: Case, resumed: Case) -> None:
    """On the same ranks, on others, and where experts lie over other ranks or over none."""
    expected, *_ = pool(4).run(run_and_save, saved, tmp_path)
    for _, losses in pool(GLOBAL_BATCH // resumed.samples).run(resume, resumed, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-11)
