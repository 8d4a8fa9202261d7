"""Any plan to any plan: what one plan saves, any other goes on from, with the same next losses.

Asked for by name, the file runs whole and prints the matrix: saved by (rows), resumed by (columns), and the largest relative
difference of the next losses from those of the run that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cases import graph_of, source_of
from pool import RankPool, this_rank

from meshwright.core.plan import Offload, Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.models.objective import slice_batch
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.offload.streamed_program import StreamedProgram
from meshwright.runtime.program import Program
from meshwright.training.checkpoint import Progress, restore, save

Pools = Callable[[int], RankPool]
Record = Callable[[str, object], None]
GLOBAL_BATCH = 12
BEFORE, AFTER = 2, 2
TOLERANCE = 1e-9
"""Relative, in float64: sums in another order, nothing else."""
ADAM = partial(torch.optim.AdamW, lr=1e-2)
TIED = "gpt:layers=4,hidden=16,heads=2,seq=8,vocab=30,tied=true"
MOE = "moe:layers=2,hidden=16,heads=2,seq=8,vocab=30,experts=4,top=2,capacity=0,every=1,balance=0"
RESNET = "resnet:depth=26,image=64,classes=10,channels=8"
NAMES = {TIED: "gpt, tied", "gpt2": "gpt2", MOE: "mixture of experts"}

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp3": (3, {"microbatch": 2}),
    "dp3 zero2": (3, {"zero": 2, "microbatch": 2}),
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
    "host optimizer": (1, {"offload": "optimizer", "offload_share": 0.6}),
    "host optimizer zero3": (2, {"offload": "optimizer", "zero": 3}),
    "streamed": (1, {"offload": "parameters", "recompute": "full"}),
    "streamed dp2": (2, {"offload": "parameters", "recompute": "full", "zero": 3}),
    "streamed, on disk": (1, {"offload": "parameters", "recompute": "full"}),
}
"""Name → ranks, and what is asked for."""


@cache
def plan_of(model: str, name: str, precision: str = "fp64") -> Plan:
    num_ranks, asked = PLANS[name]
    request = PlanRequest(**{"microbatch": 3, "global_batch": GLOBAL_BATCH, "precision": precision, **asked})
    return try_sharding(plain_plan(request, graph_of(model), num_ranks, "tests"), source_of(model))


def placed(plan: Plan, name: str, folder: Path) -> Plan:
    """With a folder for state on disk, where the plan wants one."""
    if not name.endswith("on disk"):
        return plan
    folder.mkdir(exist_ok=True)
    return msgspec.structs.replace(plan, offload=Offload(what="parameters", where="disk", folder=str(folder)))


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
    write(program, BEFORE, folder)
    found = losses(program, model, BEFORE, AFTER)
    close(program)
    return found


def write(program: Program, step: int, folder: Path) -> None:
    plan = program.plan
    progress = Progress(step=step, cursor=step, plan=plan.hash, graph=plan.graph, num_ranks=plan.world)
    save(program, progress, folder, this_rank(), keep=1)


def close(program: Program) -> None:
    if isinstance(program, StreamedProgram):
        program.close()


def resume(model: str, plan: Plan, folder: Path) -> tuple[list[float], float]:
    program = start(model, plan, seed=99)
    restore(program, plan.graph, folder, this_rank())
    found = losses(program, model, BEFORE, AFTER)
    decay = program.optimizer.param_groups[0]["weight_decay"]
    close(program)
    return found, decay


def largest_difference(found: list[float], expected: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("model", "first", "others"),
    [
        (TIED, "zero3", ("tp2", "pp2 tp2", "pp2 zbv", "dp3", "streamed")),
        (TIED, "one", ("dp3", "zero3", "host optimizer", "streamed")),
        (TIED, "dp3", ("one", "zero1 of 4", "tp2 zero1")),
        (TIED, "tp2", ("one", "zero1 of 4", "cp2")),
        (TIED, "tp2 zero3", ("dp2", "tp2", "hybrid", "host optimizer zero3")),
        (TIED, "pp2", ("zero1 of 4", "tp2 zero1", "dp3 zero2", "host optimizer")),
        (TIED, "pp2 zbv", ("pp2 zero3", "one")),
        (TIED, "pp2 tp2", ("tp2 zero3", "pp2", "dp2", "dp3", "streamed dp2")),
        (TIED, "pp2 zero3", ("cp2", "dp3 zero2", "pp2 zbv")),
        (TIED, "cp2", ("tp2", "pp2", "zero3", "hybrid")),
        (TIED, "hybrid", ("tp2", "pp2 zero3", "dp3")),
        (TIED, "host optimizer", ("one", "zero3", "pp2 tp2", "host optimizer zero3")),
        (TIED, "host optimizer zero3", ("host optimizer", "tp2", "streamed")),
        (TIED, "streamed", ("one", "streamed dp2", "host optimizer", "tp2", "streamed, on disk")),
        (TIED, "streamed dp2", ("streamed", "zero3", "pp2")),
        (TIED, "streamed, on disk", ("streamed, on disk", "one", "streamed dp2")),
        ("gpt2", "tp2 zero1", ("dp2", "pp2 tp2", "tp2 zero1")),
        ("gpt2", "zero3", ("tp2 zero3", "dp3")),
        (MOE, "ep2", ("ep2 zero2", "tp2", "pp2 ep2", "one")),
        (MOE, "pp2 ep2", ("zero3", "dp3")),
    ],
)
def test_another_plan_goes_on(
    pool: Pools, tmp_path: Path, record_property: Record, model: str, first: str, others: tuple[str, ...]
) -> None:
    plan = placed(plan_of(model, first), first, tmp_path / "state")
    checkpoints = tmp_path / "checkpoints"
    expected = pool(plan.world).run(run_and_save, model, plan, checkpoints)[0]
    assert len(set(expected)) == AFTER
    for name in others:
        other = placed(plan_of(model, name), name, tmp_path / "other state")
        for found, weight_decay in pool(other.world).run(resume, model, other, checkpoints):
            difference = largest_difference(found, expected)
            record_property("reshard", (NAMES[model], first, name, difference))
            assert difference <= TOLERANCE, f"saved by {first}, resumed by {name}: {found}, not {expected}"
            assert weight_decay == 0.3


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["host optimizer", "host optimizer zero3", "streamed", "streamed, on disk"])
def test_masters_and_moments_off_the_device(pool: Pools, tmp_path: Path, name: str, precision: str) -> None:
    """Masters in fp32 of parameters in 16 bits, and the compiled update's own moments: to the last bit."""
    plan = placed(plan_of(TIED, name, precision), name, tmp_path / "state")
    expected = pool(plan.world).run(run_and_save, TIED, plan, tmp_path / "checkpoints")[0]
    for found, weight_decay in pool(plan.world).run(resume, TIED, plan, tmp_path / "checkpoints"):
        assert (found, weight_decay) == (expected, 0.3)


CHAIN = ("zero3", "pp2 tp2", "one", "dp3")


def uninterrupted(model: str, plan: Plan, count: int) -> list[float]:
    return losses(start(model, plan, seed=0), model, 0, count)


def leg(model: str, plan: Plan, folder: Path, first_step: int) -> list[float]:
    """Go on where the last plan stopped, and stop for the next."""
    program = start(model, plan, seed=99 if first_step else 0)
    if first_step:
        assert restore(program, plan.graph, folder, this_rank()).step == first_step
    found = losses(program, model, first_step, AFTER)
    write(program, first_step + AFTER, folder)
    return found


def test_a_chain_of_plans(pool: Pools, tmp_path: Path, record_property: Record) -> None:
    """dp2 ZeRO-3 → pp2 · tp2 → one process → dp3: the losses of a run that never changed its plan."""
    expected = pool(2).run(uninterrupted, TIED, plan_of(TIED, CHAIN[0]), AFTER * len(CHAIN))[0]
    for place, name in enumerate(CHAIN):
        plan = plan_of(TIED, name)
        wanted = expected[AFTER * place : AFTER * (place + 1)]
        for found in pool(plan.world).run(leg, TIED, plan, tmp_path, AFTER * place):
            difference = largest_difference(found, wanted)
            assert difference <= TOLERANCE, f"after {CHAIN[:place]}, {name}: {found}, not {wanted}"
        record_property("reshard_chain", (name, difference))


# Batch norm


def buffers(program: Program) -> dict[str, float]:
    named = program.module.named_buffers()
    return {name: float(tensor.double().abs().sum()) for name, tensor in named if name.endswith("running_mean")}


def buffers_saved(plan: Plan, folder: Path) -> dict[str, float]:
    program = start(RESNET, plan, seed=0)
    losses(program, RESNET, 0, BEFORE)
    write(program, BEFORE, folder)
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
