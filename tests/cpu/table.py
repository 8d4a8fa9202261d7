"""The parity table: plans as rows, models as columns, and what one cell takes to fill.

A cell makes the plan of its row for its model, in float64, and runs it twice on the same ranks: beside one process (loss, every
gradient, the parameters after the last AdamW step), and under the recorder, for collectives by kind, axis and bytes against those
that cost/ predicts. Which model can run which plan is decided by the library: a plan that is refused before its first step
is a cell too, with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

import msgspec
import torch
from captures import shared_graph
from cases import ASSETS, hand_cluster
from pool import RankError, RankPool, this_rank

from meshwright.core.collective import Collective
from meshwright.core.errors import GuessWarning, PlanError
from meshwright.core.graph import Graph, Precision
from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import Estimator
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.measure.parity import ParityResult, Tamper, compare
from meshwright.measure.record import StepRecorder
from meshwright.models.source import ModelSource, resolve
from meshwright.rules.plain_plan import plain_mesh, plain_plan
from meshwright.runtime.apply import apply

SURVEY = ASSETS.parent / "survey"
MODELS = {
    "gpt": "gpt:layers=4,hidden=32,heads=4,seq=16,vocab=60",
    "moe": "moe:layers=4,hidden=32,heads=4,seq=16,vocab=60,experts=4,top=2,capacity=0,balance=0",
    "resnet": "resnet:depth=26,image=64,classes=10,channels=8",
    "vit": "vit:layers=4,hidden=32,heads=4,image=16,patch=4,classes=12",
    "Llama": f"hf:{ASSETS}/llama-tiny.json",
    "GPT-2": f"hf:{ASSETS}/gpt2-tiny.json",
    "BERT": f"hf:{ASSETS}/bert-tiny.json",
    "T5": f"hf:{ASSETS}/t5-tiny.json",
    "ViT": f"hf:{ASSETS}/vit-tiny.json",
    "Mixtral": f"hf:{ASSETS}/mixtral-tiny.json",
}
"""`moe` drops no choice, so that what goes over ep can be predicted."""
BESIDES = {
    "gpt by single ops": "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=60,attention=eager",
    "moe that drops": "moe:layers=2,hidden=32,heads=4,seq=16,vocab=60,experts=4,top=2,capacity=1,balance=0",
    "moe in balance": "moe:layers=2,hidden=32,heads=4,seq=16,vocab=60,experts=4,top=1,capacity=0,balance=0.1",
    "gpt of odd length": "gpt:layers=2,hidden=32,heads=4,seq=15,vocab=60",
    "moe of odd length": "moe:layers=2,hidden=32,heads=4,seq=15,vocab=60,experts=4,top=2,capacity=1,balance=0.1",
    "BERT of odd length": "bert:layers=2,hidden=32,heads=4,seq=15,vocab=64",
    "DeiT": f"hf:{SURVEY}/vision/deit.json",
    "DINOv2": f"hf:{ASSETS}/dinov2-tiny.json",
    "BEiT": f"hf:{SURVEY}/vision/beit.json",
    "wav2vec2": f"hf:{ASSETS}/wav2vec2-tiny.json",
    "I-JEPA": f"hf:{SURVEY}/vision/ijepa.json",
    "DiT": f"{SURVEY}/by_hand/diffusion.py:dit",
}
"""Models that are tried but have no column."""
NUM_STEPS = 5
RECORDED_STEPS = 4
"""The recorder looks closely at one of the first steps, when torch has made its buckets anew."""
SCHEDULES = tuple(KINDS)


@dataclass(frozen=True)
class Row:
    """A plan, for whatever model."""

    num_ranks: int
    request: PlanRequest

    def __str__(self) -> str:
        """`pp2 zb · tp2 sp · dp2 ZeRO 1`"""
        asked = self.request
        tp = f"tp{asked.tp}{' sp' if asked.sequence_parallel else ''}" if asked.tp else ""
        pp = f"pp{asked.pp} {asked.schedule or '1f1b'}" if asked.pp else ""
        dp = f"dp{self.dp} ZeRO {asked.zero or 0}" if self.dp > 1 else ""
        dp += f" hybrid{asked.hybrid}" if asked.hybrid else ""
        cp, ep = (f"{axis}{degree}" if degree else "" for axis, degree in (("cp", asked.cp), ("ep", asked.ep)))
        cp += f" {asked.context}" if asked.context else ""
        again = f"recompute {asked.recompute}" if asked.recompute else ""
        norms = "synchronised norms" if asked.sync_batch_norm else ""
        return " · ".join(filter(None, (pp, tp, cp, ep, dp, again, norms)))

    @property
    def dp(self) -> int:
        return plain_mesh(self.request, self.num_ranks).dp

    def plan(self, model: str) -> Plan:
        """Two microbatches; with stages four, so that every schedule has work for all of them."""
        source = source_of(model, "fp64")
        count = 4 if self.request.pp else 2
        wish = PlanRequest(precision="fp64", microbatch=2, global_batch=2 * count * self.dp)
        plan = plain_plan(self.request.updated(wish), graph_of(model, "fp64"), self.num_ranks, "table")
        return try_sharding(plan, source)


def row(num_ranks: int, **asked: object) -> Row:
    return Row(num_ranks, msgspec.convert(asked, PlanRequest))


ALONE = (
    *(row(2, zero=zero) for zero in range(4)),
    row(4, zero=2, hybrid=2),
    row(4, zero=3, hybrid=2),
    row(2, tp=2),
    row(2, tp=2, sequence_parallel=True),
    row(2, cp=2),
    row(2, cp=2, context="ring"),
    row(2, ep=2),
    *(row(2, pp=2, schedule=schedule) for schedule in SCHEDULES),
    row(2, recompute="full"),
    row(2, recompute="selective"),
)
PAIRS = (
    *(row(4, tp=2, zero=zero) for zero in (0, 3)),
    row(4, tp=2, sequence_parallel=True, zero=2),
    row(4, cp=2, zero=0),
    row(4, cp=2, zero=3),
    row(4, cp=2, context="ring", zero=3),
    row(4, ep=2, zero=0),
    row(4, ep=2, zero=3),
    row(4, pp=2, zero=1),
    row(4, pp=2, zero=3, schedule="gpipe"),
    row(4, pp=2, zero=2, schedule="zbv"),
    row(4, tp=2, cp=2),
    row(4, tp=2, sequence_parallel=True, cp=2),
    row(4, tp=2, cp=2, context="ring"),
    row(4, tp=2, sequence_parallel=True, cp=2, context="ring"),
    row(4, cp=4, context="ring"),
    row(4, tp=2, ep=2),
    row(4, tp=2, sequence_parallel=True, ep=2),
    row(4, tp=2, pp=2),
    row(4, tp=2, sequence_parallel=True, pp=2, schedule="zb"),
    row(4, cp=2, ep=2),
    row(4, cp=2, pp=2, schedule="interleaved"),
    row(4, cp=2, context="ring", pp=2),
    row(4, ep=2, pp=2),
    row(2, tp=2, recompute="full"),
    row(2, tp=2, sequence_parallel=True, recompute="selective"),
    row(2, cp=2, recompute="full"),
    row(2, cp=2, recompute="selective"),
    row(2, cp=2, context="ring", recompute="full"),
    row(2, cp=2, context="ring", recompute="selective"),
    row(2, ep=2, recompute="full"),
    row(2, ep=2, recompute="selective"),
    row(2, pp=2, recompute="full"),
    row(2, pp=2, recompute="selective"),
    row(2, zero=3, recompute="full"),
    row(2, zero=2, recompute="selective"),
    row(4, zero=3, hybrid=2, recompute="full"),
    row(8, tp=2, zero=3, hybrid=2),
    row(8, cp=2, zero=2, hybrid=2),
    row(8, pp=2, zero=1, hybrid=2),
    row(4, ep=2, zero=2, hybrid=2),
)
TRIPLES = (
    row(8, pp=2, tp=2, zero=1),
    row(8, pp=2, cp=2, zero=2),
    row(8, tp=2, cp=2, zero=3),
    row(8, pp=2, tp=2, ep=2),
    row(8, pp=2, tp=2, cp=2),
)
ROWS = (*ALONE, *PAIRS, *TRIPLES)


@dataclass(frozen=True)
class Cell:
    """What became of a plan for a model."""

    result: ParityResult | None = None
    collectives: str = ""
    """Predicted against observed, where they differ."""
    refused: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.refused) or (self.result is not None and self.result.ok and not self.collectives)

    @property
    def wrong(self) -> str:
        """Everything that is, in words."""
        difference = self.result.first_difference if self.result else None
        return "; ".join(filter(None, (self.error, difference, self.collectives)))


@cache
def source_of(model: str, precision: Precision) -> ModelSource:
    """For float64, those of transformers are shrunk, which takes what float64 cannot do out of their configs; blocks stay."""
    found = resolve({**MODELS, **BESIDES}[model])
    return found.small() if found.name.startswith("hf:") and precision == "fp64" else found


@cache
def graph_of(model: str, precision: Precision) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GuessWarning)  # of how many rows an expert gets
        return shared_graph(source_of(model, precision), precision, f"{model} of the table")


def fill(ranks: RankPool, model: str, row: Row, num_steps: int = NUM_STEPS, tamper: Tamper | None = None) -> Cell:
    """Run one cell of the table."""
    try:
        plan = row.plan(model)
        results = ranks.run(compare_on_rank, model, plan, num_steps, tamper)
        worst = max(results, key=lambda result: (not result.ok, result.max_gradient_difference))
        return Cell(worst, compare_collectives(ranks, model, plan))
    except PlanError as error:
        return Cell(refused=str(error))
    except RankError as error:
        return _of_errors(error)
    except TimeoutError as error:
        return Cell(error=str(error))


def _of_errors(raised: RankError) -> Cell:
    """All ranks refuse a plan alike, before any of them has begun."""
    first, *others = raised.errors.values()
    kind, _, words = first.partition(": ")
    if kind == "PlanError" and all(other.startswith("PlanError: ") for other in others):
        return Cell(refused=words)
    return Cell(error=first)


def compare_on_rank(model: str, plan: Plan, num_steps: int, tamper: Tamper | None) -> ParityResult:
    return compare(source_of(model, "fp64"), plan, num_steps, this_rank(), tamper)


# ---------------------------------------------------------------- collectives


@dataclass(frozen=True)
class Seen:
    coordinate: int
    """Of pp."""
    context: int
    """Of cp."""
    collectives: tuple[Collective, ...]


def compare_collectives(ranks: RankPool, model: str, plan: Plan) -> str:
    """Where predicted and observed differ, in words; '' where they agree on every rank.

    What a rank sends back from its experts depends on the routing: those bytes are compared over all ranks together.
    """
    graph = graph_of(model, "fp32")
    plan = msgspec.structs.replace(plan, precision="fp32", graph=graph.identity)
    recipe = Recipe(optimizer_slots=1, optimizer_scalar_bytes=0, clips=True)
    estimator = Estimator(graph, plan, hand_cluster(plan.world), recipe)
    every: list[Seen] = ranks.run(record_on_rank, model, plan)
    predicted = [estimator.collectives(seen.coordinate, seen.context) for seen in every]
    pairs = [(_by_call(p), _by_call(seen.collectives)) for p, seen in zip(predicted, every, strict=True)]
    pairs.append(
        (_routed(row for rows in predicted for row in rows), _routed(row for s in every for row in s.collectives))
    )
    for expected, found in pairs:
        for call in sorted({*expected, *found}):
            if expected.get(call) != found.get(call):
                return f"{' '.join(call)}: predicted {expected.get(call)}, observed {found.get(call)}"
    return ""


def _by_call(rows: Iterable[Collective]) -> dict[tuple[str, ...], tuple[int, int]]:
    return {(row.kind, row.axis): (row.count, row.total_bytes if row.axis != "ep" else 0) for row in rows}


def _routed(rows: Iterable[Collective]) -> dict[tuple[str, ...], tuple[int, int]]:
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for row in rows:
        if row.axis == "ep":
            count, num_bytes = found.get((row.kind, "ep", "of all ranks"), (0, 0))
            found[row.kind, "ep", "of all ranks"] = (count + row.count, num_bytes + row.total_bytes)
    return found


def record_on_rank(model: str, plan: Plan) -> Seen:
    """Clipped steps under the recorder."""
    source = source_of(model, "fp32")
    torch.manual_seed(0)
    program = apply(
        source.build(), plan, optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9), objective=source.objective,
        max_norm=1.0, recorder=StepRecorder(), device=this_rank().device,
    )  # fmt: skip
    assert source.example is not None
    for _ in range(RECORDED_STEPS):
        program.step(source.example(plan.global_batch))
    here = program.pipeline.here if program.pipeline else 0
    return Seen(here, program.mesh.get_local_rank("cp"), program.trace().collectives)
