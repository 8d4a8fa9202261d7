"""Plans with stages: the same loss, gradients and parameters as one process, and the collectives that were predicted."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from cases import ASSETS, graph_of, hand_cluster, source_of
from pool import RankError, RankPool, this_rank
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from meshwright.core.collective import Collective
from meshwright.core.errors import PlanError
from meshwright.core.names import compact_names
from meshwright.core.pipeline.kinds import KINDS, in_flight
from meshwright.core.pipeline.schedule import Action
from meshwright.core.plan import Plan, Stage
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import Estimator
from meshwright.measure.parity import ParityResult, Tamper, compare
from meshwright.measure.record import StepRecorder
from meshwright.models.objective import call
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]
SCHEDULES = tuple(KINDS)
DEEP = "gpt:layers=4,hidden=16,heads=2,seq=8,vocab=30"
TIED = f"{DEEP},tied=true"
HARD = f"{ASSETS}/pipelines.py"


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    samples: int = 4
    """Of the global batch; microbatches have one."""
    uneven: tuple[int, ...] = ()
    """Blocks of each stage, where not even."""

    def __str__(self) -> str:
        name = self.model.rpartition(":")[2] if self.model.startswith("/") else self.model.partition(",")[0]
        return "-".join([name, *(f"{key}{value}" for key, value in self.options.items())])

    @property
    def num_ranks(self) -> int:
        return int(self.options.get("pp", 2) * self.options.get("dp", 1))

    def plan(self, precision: str = "fp64") -> Plan:
        request = PlanRequest(
            **{"pp": 2, "microbatch": 1, "global_batch": self.samples, "precision": precision, **self.options}
        )
        plan = plain_plan(request, graph_of(self.model), self.num_ranks, "tests")
        return msgspec.structs.replace(plan, stages=self.stages(plan)) if self.uneven else plan

    def stages(self, plan: Plan) -> tuple[Stage, ...]:
        blocks, found = list(plan.blocks), []
        for stage, count in zip(plan.stages, self.uneven, strict=True):
            found.append(Stage(coordinate=stage.coordinate, blocks=compact_names(blocks[:count])))
            blocks = blocks[count:]
        assert not blocks
        return tuple(found)


TWO = [
    *(Row(DEEP, {"schedule": schedule}) for schedule in SCHEDULES),
    *(Row(TIED, {"schedule": schedule, "recompute": "full"}) for schedule in ("1f1b", "interleaved", "zbv")),
    Row("grouped", {"schedule": "zb"}),
    Row("llama"),
    Row("gpt2", {"schedule": "zb", "recompute": "full"}),
    Row("resnet", {"schedule": "zb"}),
    Row("frozen"),
    Row("unused"),
    Row(DEEP, uneven=(3, 5)),
    Row(DEEP, {"schedule": "zbv"}, uneven=(2, 2, 1, 3)),
    Row(f"{HARD}:encoder_decoder"),
    Row(f"{HARD}:encoder_decoder", {"schedule": "zbv"}),
    Row(f"{HARD}:skipping", {"schedule": "interleaved", "recompute": "full"}),
    Row(f"{HARD}:backwards"),
]
OWN_ENDS = [
    *(
        Row(TIED, {"ends": "own", "schedule": schedule})
        for schedule in ("interleaved", "breadth-first", "zbv", "dualpipev")
    ),
    Row(TIED, {"ends": "own", "schedule": "interleaved", "virtual": 3, "recompute": "full"}, 3),
    Row(TIED, {"ends": "fewer", "schedule": "1f1b", "recompute": "selective"}),
    Row("hf_t5", {"ends": "own", "schedule": "interleaved"}),
    *(
        Row(TIED, {"ends": "own", "pp": 4, "schedule": schedule, "recompute": "full"})
        for schedule in ("gpipe", "1f1b", "zb")
    ),
    Row("llama", {"ends": "own", "pp": 4}),
    Row("llama", {"ends": "own", "schedule": "zbv"}),
    Row("gpt2", {"ends": "own", "pp": 4, "schedule": "zb"}),
    Row(f"{HARD}:encoder_decoder", {"ends": "own", "pp": 4}),
    *(Row(TIED, {"ends": "own", "dp": 2, "zero": zero, "schedule": "interleaved"}) for zero in (0, 1, 2, 3)),
    Row(TIED, {"ends": "own", "dp": 2, "zero": 1, "schedule": "zbv", "recompute": "full"}),
    Row(TIED, {"ends": "own", "dp": 2, "zero": 1, "schedule": "dualpipev"}, 8),
]
"""Stages that hold the embedding or the head alone."""
FOUR = [
    Row(DEEP, {"pp": 4}, 6),
    Row(DEEP, {"pp": 4, "schedule": "zb"}, 4),
    Row(f"{HARD}:encoder_decoder", {"pp": 4}, 4),
    Row(f"{HARD}:skipping", {"pp": 4, "schedule": "gpipe"}, 4),
    *(Row(TIED, {"dp": 2, "zero": zero, "recompute": "full"}) for zero in (0, 1, 2, 3)),
    Row(TIED, {"dp": 2, "zero": 1, "schedule": "zbv"}),
    Row(TIED, {"dp": 2, "zero": 2, "schedule": "zb"}),
    Row(TIED, {"dp": 2, "zero": 2, "schedule": "dualpipev"}, 8),
    Row(TIED, {"dp": 2, "zero": 3, "schedule": "interleaved"}),
    Row("odd", {"dp": 2, "zero": 3}),
    Row("unused", {"dp": 2}),
    Row(f"{HARD}:skipping", {"dp": 2, "zero": 2}),
]


def compare_on_rank(model: str, plan: Plan, num_steps: int = 2, tamper: Tamper | None = None) -> ParityResult:
    return compare(source_of(model), plan, num_steps, this_rank(), tamper)


@pytest.mark.parametrize("row", [*TWO, *OWN_ENDS, *FOUR], ids=str)
def test_stages_agree_with_one_process(pool: Pools, row: Row) -> None:
    results = pool(row.num_ranks).run(compare_on_rank, row.model, row.plan())
    for result in results:
        assert result.first_difference is None
        assert result.max_loss_difference <= 1e-14
        assert result.num_tensors > 0
    assert len({result.losses for result in results}) == 1, "ranks report different losses"


# Planted errors


def lose_a_gradient(program: Program) -> None:
    """What comes back to the first stage is halved."""
    assert program.pipeline is not None
    links = program.pipeline.links
    send = links.send_like

    def halved(to: int, tensors: list[Tensor], action: Action) -> None:
        send(to, [tensor / 2 for tensor in tensors] if action.kind == "send_backward" else tensors, action)

    links.send_like = halved  # type: ignore[method-assign]


def forget_ties(program: Program) -> None:
    assert program.pipeline is not None
    program.pipeline.tied.add_gradients = lambda: None  # type: ignore[method-assign]


def forget_weights(program: Program) -> None:
    """The gradients that were put off are dropped."""
    assert program.pipeline is not None
    later = program.pipeline.later
    assert later is not None
    later.run = lambda owner: later.queues.pop(owner, None)  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("tamper", "row", "found"),
    [
        (lose_a_gradient, Row(DEEP), "token_embedding.weight"),
        (forget_ties, Row(TIED), "token_embedding.weight"),
        (forget_weights, Row(DEEP, {"schedule": "zb"}), "blocks.0.attention.query.weight"),
    ],
)
def test_a_planted_error_is_found(pool: Pools, tamper: Tamper, row: Row, found: str) -> None:
    for result in pool(2).run(compare_on_rank, row.model, row.plan(), 1, tamper):
        assert result.first_difference is not None
        assert result.first_difference.startswith(f"step 0: gradient of {found}")


# What is kept of messages


def kept_messages(plan: Plan) -> tuple[int, int, int, int]:
    """The most tensors under way at once and at the end of a step, how many were sent, and how many of those that were
    released are still in memory."""
    program = apply(source_of(DEEP).build(), plan, optimizer=torch.optim.SGD, device=this_rank().device)
    assert program.pipeline is not None
    links, counts, sent = program.pipeline.links, [0], []
    post = links._post

    def counted(coordinate: int, tensor: Tensor, action: Action) -> None:
        post(coordinate, tensor, action)
        sent.append(weakref.ref(links.under_way[-1].tensor))
        counts.append(len(links.under_way))

    links._post = counted  # type: ignore[method-assign]
    example = source_of(DEEP).example
    assert example is not None
    program.step(example(plan.global_batch))
    gc.collect()
    return max(counts), len(links.under_way), len(sent), sum(one() is not None for one in sent)


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "interleaved"])
def test_what_was_sent_is_freed_when_it_has_arrived(pool: Pools, schedule: str) -> None:
    virtual = {"virtual": 2} if schedule == "interleaved" else {}
    plan = Row(DEEP, {"schedule": schedule, "microbatch": 1, "global_batch": 16, **virtual}).plan()
    for most, left, number, alive in pool(2).run(kept_messages, plan):
        assert number >= 16, "every microbatch crosses"
        assert most <= 8, "of 16 microbatches"
        assert left == alive == 0


# What is predicted


@dataclass(frozen=True)
class Seen:
    here: int
    observed: tuple[Collective, ...]
    most_in_flight: int
    expected_in_flight: int
    norm: float | None
    evaluated: float
    loss: float
    parts: Any


def build(model: str) -> nn.Module:
    """The same weights on every rank, and no dropout."""
    torch.manual_seed(1)
    module = source_of(model).build()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


def train_on_rank(model: str, plan: Plan) -> Seen:
    """Four clipped steps under the recorder, and an evaluation."""
    source = source_of(model)
    program = apply(
        build(model), plan, optimizer=lambda found: torch.optim.SGD(found, lr=1e-3), objective=source.objective, max_norm=0.1,
        recorder=StepRecorder(), device=this_rank().device,
    )  # fmt: skip
    assert source.example is not None
    batch = source.example(plan.global_batch)
    evaluated = program.evaluate([batch])
    outputs = [program.step(batch) for _ in range(4)]
    assert program.pipeline is not None
    here = program.pipeline.here
    return Seen(
        here, program.trace().collectives, program.pipeline.most_in_flight,
        in_flight(plan.schedule, plan.mesh.pp, plan.num_microbatches, plan.virtual)[here],
        outputs[0].gradient_norm, evaluated, outputs[0].loss,
        outputs[1].time_seconds,
    )  # fmt: skip


PREDICTED = [
    *(Row(TIED, {"schedule": schedule}) for schedule in SCHEDULES),
    Row("llama"),
    Row("gpt2", {"schedule": "zb"}),
    Row(f"{HARD}:encoder_decoder", {"schedule": "interleaved"}),
    Row(f"{HARD}:skipping", {"pp": 4}),
    *(Row(TIED, {"dp": 2, "zero": zero}) for zero in (0, 1, 2, 3)),
    *(row for row in OWN_ENDS if row.model != "hf_t5"),  # whose dropout lies in functions
    Row("t5", {"ends": "own", "schedule": "interleaved"}),
    Row(TIED, {"dp": 2, "zero": 2, "schedule": "zbv"}),
    Row(TIED, {"dp": 2, "zero": 1, "schedule": "interleaved"}),
]


@pytest.mark.parametrize("row", PREDICTED, ids=str)
def test_collectives(pool: Pools, row: Row) -> None:
    plan = row.plan("fp32")
    every = pool(row.num_ranks).run(train_on_rank, row.model, plan)
    recipe = Recipe(optimizer_slots=0, optimizer_scalar_bytes=0, clips=True)
    estimator = Estimator(graph_of(row.model), plan, hand_cluster(row.num_ranks), recipe)
    for seen in every:
        assert seen.observed == estimator.collectives(seen.here)
        assert seen.most_in_flight == seen.expected_in_flight
        assert seen.evaluated == pytest.approx(seen.loss, rel=1e-6)
        assert min(seen.parts.forward, seen.parts.backward) > 0
    assert len({seen.norm for seen in every}) == 1
    assert every[0].norm == pytest.approx(norm_of_one_process(row), rel=1e-5)


def norm_of_one_process(row: Row) -> float:
    """The norm of the first step's gradients."""
    source, module = source_of(row.model), build(row.model)
    assert source.example is not None
    batch = source.example(row.samples)
    source.objective.loss(call(module, batch), batch).backward()
    return float(get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


def test_one_forward_one_backward_holds_fewer_microbatches_than_gpipe(pool: Pools) -> None:
    held = {
        schedule: [seen.most_in_flight for seen in pool(2).run(train_on_rank, DEEP, row.plan("fp32"))]
        for schedule in ("gpipe", "1f1b")
        for row in [Row(DEEP, {"schedule": schedule}, 6)]
    }
    assert held == {"gpipe": [6, 6], "1f1b": [2, 1]}


# What is refused


def refused_on_rank(model: str, plan: Plan) -> None:
    source = source_of(model)
    program = apply(source.build(), plan, optimizer=torch.optim.AdamW, device=this_rank().device)
    assert source.example is not None
    program.step(source.example(plan.global_batch))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("backwards", "the model cannot be cut at block 'parts.1': it is on stage 0, but reads what stage 1 makes"),
        ("peeking", "the model cannot be cut: outside its blocks it reads a value of what block 'enter' made"),
    ],
)
def test_what_cannot_be_cut_is_refused(pool: Pools, model: str, said: str) -> None:
    with pytest.raises(RankError) as raised:
        pool(2).run(refused_on_rank, f"{HARD}:{model}", Row(f"{HARD}:skipping").plan("fp32"))
    assert all(said in error for error in raised.value.errors.values()), raised.value


def test_an_estimate_refuses_what_cannot_be_cut() -> None:
    plan = Row(f"{HARD}:skipping").plan("fp32")  # the same blocks, but run in another order
    with pytest.raises(PlanError, match=r"cannot be cut at block 'parts\.1'"):
        Estimator(graph_of(f"{HARD}:backwards"), plan, hand_cluster(2), Recipe())


@pytest.mark.parametrize("schedule", ["zb", "zbv", "dualpipev"])
def test_zero_3_gives_up_what_a_split_backward_needs(pool: Pools, schedule: str) -> None:
    with pytest.raises(RankError, match=f"ZeRO 3 with schedule {schedule}"):
        pool(2).run(refused_on_rank, DEEP, Row(DEEP, {"zero": 3, "schedule": schedule}).plan("fp32"))


def test_ranks_start_from_the_first_ones_weights(pool: Pools) -> None:
    """Whatever each rank has drawn."""
    values = pool(4).run(tied_values_on_rank, TIED, Row(TIED, {"dp": 2}).plan("fp32"))
    assert len(set(values)) == 1


def tied_values_on_rank(model: str, plan: Plan) -> float:
    torch.manual_seed(int(os.environ["RANK"]))
    program = apply(source_of(model).build(), plan, optimizer=torch.optim.AdamW, device=this_rank().device)
    name = "token_embedding.weight" if program.pipeline and program.pipeline.here == 0 else "head.weight"
    return float(program.module.get_parameter(name).sum())
