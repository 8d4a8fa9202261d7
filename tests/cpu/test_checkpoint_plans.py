"""Checkpoints across plans: what one plan saves, any other goes on from, with the same next losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import graph_of, source_of
from pool import RankPool, this_rank

from meshwright.cli.shardings import try_sharding
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest, plain_plan
from meshwright.models.objective import slice_batch
from meshwright.runtime.apply import apply
from meshwright.runtime.program import Program
from meshwright.train.checkpoint import Progress, restore, save

Pools = Callable[[int], RankPool]
GLOBAL_BATCH = 4
BEFORE, AFTER = 2, 2
ADAM = partial(torch.optim.AdamW, lr=1e-2)
TIED = "gpt:layers=4,hidden=16,heads=2,seq=8,vocab=30,tied=true"
MOE = "moe:layers=2,hidden=16,heads=2,seq=8,vocab=30,experts=4,top=2,capacity=0,every=1,balance=0"
RESNET = "resnet:depth=26,image=64,classes=10,channels=8"

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "zero3": (2, {"zero": 3}),
    "zero1 of 4": (4, {"zero": 1}),
    "hybrid": (4, {"zero": 3, "hybrid": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2 zero1": (4, {"tp": 2, "zero": 1}),
    "tp2 zero3": (4, {"tp": 2, "zero": 3, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2 zbv": (2, {"pp": 2, "schedule": "zbv"}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2}),
    "ep2 zero2": (4, {"ep": 2, "zero": 2}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
}
"""Name → ranks, and what is asked for."""


@cache
def plan_of(model: str, name: str, precision: str = "fp64") -> Plan:
    num_ranks, asked = PLANS[name]
    request = PlanRequest(microbatch=1, global_batch=GLOBAL_BATCH, precision=precision, **asked)  # type: ignore[arg-type]
    return try_sharding(plain_plan(request, graph_of(model), num_ranks, "tests"), source_of(model))


def start(model: str, plan: Plan, seed: int) -> Program:
    torch.manual_seed(seed)
    source = source_of(model)
    module = source.build()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return apply(module, plan, optimizer=ADAM, objective=source.objective, device=this_rank().device)


def losses(program: Program, model: str, first: int, count: int) -> list[float]:
    example = source_of(model).example
    assert example is not None
    batches = example((first + count) * GLOBAL_BATCH)
    starts = range(first * GLOBAL_BATCH, (first + count) * GLOBAL_BATCH, GLOBAL_BATCH)
    return [program.step(slice_batch(batches, start, start + GLOBAL_BATCH)).loss for start in starts]


def run_and_save(model: str, plan: Plan, folder: Path) -> list[float]:
    program = start(model, plan, seed=0)
    program.optimizer.param_groups[0]["weight_decay"] = 0.3
    losses(program, model, 0, BEFORE)
    progress = Progress(step=BEFORE, cursor=BEFORE, plan=plan.hash, graph=plan.graph, num_ranks=plan.world)
    save(program, progress, folder, this_rank(), keep=1)
    return losses(program, model, BEFORE, AFTER)


def resume(model: str, plan: Plan, folder: Path) -> tuple[list[float], float]:
    program = start(model, plan, seed=99)
    restore(program, plan.graph, folder, this_rank())
    return losses(program, model, BEFORE, AFTER), program.optimizer.param_groups[0]["weight_decay"]


@pytest.mark.parametrize(
    ("model", "first", "others"),
    [
        (TIED, "zero3", ("tp2", "pp2 tp2", "pp2 zbv")),
        (TIED, "tp2", ("one", "zero1 of 4", "cp2")),
        (TIED, "tp2 zero3", ("dp2", "tp2", "hybrid")),
        (TIED, "pp2", ("zero1 of 4", "tp2 zero1")),
        (TIED, "pp2 zbv", ("pp2 zero3",)),
        (TIED, "pp2 tp2", ("tp2 zero3", "pp2", "dp2")),
        (TIED, "hybrid", ("tp2", "pp2 zero3")),
        ("gpt2", "tp2 zero1", ("dp2", "pp2 tp2", "tp2 zero1")),
        ("gpt2", "zero3", ("tp2 zero3",)),
        (MOE, "ep2", ("ep2 zero2", "tp2", "pp2 ep2")),
        (MOE, "pp2 ep2", ("zero3",)),
    ],
)
def test_another_plan_goes_on(pool: Pools, tmp_path: Path, model: str, first: str, others: tuple[str, ...]) -> None:
    plan = plan_of(model, first)
    expected = pool(plan.world).run(run_and_save, model, plan, tmp_path)[0]
    assert len(set(expected)) == AFTER
    for name in others:
        other = plan_of(model, name)
        for found, weight_decay in pool(other.world).run(resume, model, other, tmp_path):
            assert found == pytest.approx(expected, rel=1e-9), f"saved by {first}, resumed by {name}"
            assert weight_decay == 0.3


# Batch norm


def buffers(program: Program) -> dict[str, float]:
    named = program.module.named_buffers()
    return {name: float(tensor.double().abs().sum()) for name, tensor in named if name.endswith("running_mean")}


def buffers_saved(plan: Plan, folder: Path) -> dict[str, float]:
    program = start(RESNET, plan, seed=0)
    losses(program, RESNET, 0, BEFORE)
    progress = Progress(step=BEFORE, cursor=BEFORE, plan=plan.hash, graph=plan.graph, num_ranks=plan.world)
    save(program, progress, folder, this_rank(), keep=1)
    return buffers(program)


def buffers_restored(plan: Plan, folder: Path) -> dict[str, float]:
    program = start(RESNET, plan, seed=99)
    restore(program, plan.graph, folder, this_rank())
    return buffers(program)


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_statistics_of_batch_norm(pool: Pools, tmp_path: Path, name: str) -> None:
    """Each of the parts, and all of them together, are those of one process that sees the same microbatches."""
    reference, _ = tmp_path / "one", tmp_path.joinpath("one").mkdir()
    (expected,) = pool(1).run(buffers_saved, plan_of(RESNET, "one"), reference)
    plan = plan_of(RESNET, name)
    saved = pool(2).run(buffers_saved, plan, tmp_path)
    (restored,) = pool(1).run(buffers_restored, plan_of(RESNET, "one"), tmp_path)
    together = {**saved[0], **saved[1]}
    assert restored == pytest.approx(together, rel=1e-12)
    assert together == pytest.approx(expected, rel=1e-6)
    assert all(part.items() <= together.items() for part in saved)
