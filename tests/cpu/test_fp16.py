"""fp16: the loss is scaled, ranks agree on which updates to leave out, the scale is part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, graph_of, plan_of, source_of
from pool import RankError, RankPool, this_rank
from test_collectives_and_memory import check_collectives_and_state
from torch import nn

from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.models.objective import DEFAULT, Objective
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime import scaling
from meshwright.runtime.apply import apply, wrap
from meshwright.runtime.clip import local
from meshwright.runtime.program import Program
from meshwright.training import checkpoint
from meshwright.training.checkpoint import Progress

Pools = Callable[[int], RankPool]

BAND = 0.02
"""Share by which fp16 may miss the loss of fp32 over a few steps."""


def program_of(case: Case, objective: Objective = DEFAULT) -> Program:
    torch.manual_seed(0)
    return apply(
        source_of(case.model).build(), plan_of(case), optimizer=torch.optim.AdamW, objective=objective, max_norm=1.0,
        device=this_rank().device,
    )  # fmt: skip


def losses_on_rank(case: Case) -> list[float]:
    program = program_of(case)
    torch.manual_seed(1)
    batch = source_of(case.model).example(program.plan.global_batch)  # type: ignore[misc]
    return [program.step(batch).loss for _ in range(4)]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_losses_are_those_of_fp32_within_a_band(pool: Pools, zero: int) -> None:
    expected = pool(2).run(losses_on_rank, Case("gpt", zero, "none", 2, "fp32"))[0]
    found, other = pool(2).run(losses_on_rank, Case("gpt", zero, "none", 2, "fp16"))
    assert found == other
    assert found == pytest.approx(expected, rel=BAND)
    assert found != expected
    assert found[-1] < found[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_collectives_and_state(pool: Pools, zero: int) -> None:
    check_collectives_and_state(pool(2), Case("gpt", zero, "none", 2, "fp16"))


def scales_on_rank(case: Case, spoilt_step: int) -> list[tuple[float, float, float, float | None]]:
    """Scale, first parameter, loss and norm after each step; in one of them rank 1 alone has a gradient that is not finite."""
    program = program_of(case)
    assert program.loss_scale is not None
    scaling.GROWTH_INTERVAL = 2
    batch = source_of(case.model).example(program.plan.global_batch)  # type: ignore[misc]
    parameter = list(program.module.parameters())[-1]
    found = []
    unscale = program.loss_scale.unscale
    for step in range(6):

        def spoil(parameters: Any, step: int = step) -> bool:
            if step == spoilt_step and this_rank().number == 1:
                assert parameter.grad is not None
                local(parameter.grad).view(-1)[0] = torch.nan
            return unscale(parameters)

        program.loss_scale.unscale = spoil  # type: ignore[method-assign]
        output = program.step(batch)
        found.append((program.loss_scale.scale, float(local(parameter).sum()), output.loss, output.gradient_norm))
    scaling.GROWTH_INTERVAL = 2000
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_one_rank_s_infinity_stops_the_update_of_all(pool: Pools, zero: int) -> None:
    """Two good steps double the scale; the third, spoilt on rank 1, halves it and leaves all parameters as they are."""
    both = pool(2).run(scales_on_rank, Case("gpt", zero, "none", 1, "fp16"), 2)
    for steps in both:
        assert [scale / scaling.FIRST_SCALE for scale, *_ in steps] == [1, 2, 1, 1, 2, 2]
        sums = [total for _, total, *_ in steps]
        assert sums[2] == sums[1]
        assert len(set(sums)) == 5
        assert steps[2][3] == float("inf")
        assert all(norm is not None and norm < 100 for *_, norm in steps[3:])


def overflow_on_rank(case: Case) -> list[float]:
    """A loss so large that backward overflows in fp16 until the scale is small enough."""
    large = Objective(loss=lambda output, batch: DEFAULT.loss(output, batch) * 2.0**10, count=DEFAULT.count)
    program = program_of(case, large)
    assert program.loss_scale is not None
    batch = source_of(case.model).example(program.plan.global_batch)  # type: ignore[misc]
    found = []
    for _ in range(16):
        program.step(batch)
        found.append(program.loss_scale.scale)
    return found


@pytest.mark.parametrize("zero", [0, 3])
def test_the_scale_falls_until_gradients_fit(pool: Pools, zero: int) -> None:
    one, other = pool(2).run(overflow_on_rank, Case("gpt", zero, "none", 1, "fp16"))
    assert one == other
    assert one[0] == scaling.FIRST_SCALE / 2
    assert one[-1] == one[-2]
    assert one[-1] < scaling.FIRST_SCALE


def save_and_restore_on_rank(case: Case, folder: Path) -> tuple[float, int]:
    program = program_of(case)
    assert program.loss_scale is not None
    batch = source_of(case.model).example(program.plan.global_batch)  # type: ignore[misc]
    program.step(batch)
    program.loss_scale.scale, program.loss_scale.num_good_steps = 512.0, 7
    graph = graph_of(case.model).identity
    progress = Progress(step=1, cursor=0, plan=program.plan.hash, graph=graph, num_ranks=2)
    checkpoint.save(program, progress, folder, this_rank(), keep=1)
    fresh = program_of(case)
    checkpoint.restore(fresh, graph, folder, this_rank())
    assert fresh.loss_scale is not None
    return fresh.loss_scale.scale, fresh.loss_scale.num_good_steps


def test_the_scale_is_part_of_a_checkpoint(pool: Pools, tmp_path: Path) -> None:
    found = pool(2).run(save_and_restore_on_rank, Case("gpt", 3, "none", 1, "fp16"), tmp_path)
    assert found == [(512.0, 7), (512.0, 7)]


PLANS: dict[str, dict[str, Any]] = {
    "one": {}, "dp2 zero3": {"dp": 2, "zero": 3}, "pp2": {"pp": 2}, "tp2": {"tp": 2}, "offload": {"offload": "optimizer"}
}  # fmt: skip
GPT = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=256"
SPOILT = 3
"""A step whose gradients are not finite."""


def run_on_rank(name: str, folder: Path, until: int, resumes: bool) -> list[tuple[float, float, int]]:
    """Loss, scale and good steps after each step; the scale doubles after every fifth good step, and step 3 is spoilt."""
    request = PlanRequest(global_batch=8, precision="fp16", **PLANS[name])
    plan = try_sharding(plain_plan(request, graph_of(GPT), this_rank().num_ranks, "tests"), resolve(GPT))
    torch.manual_seed(0)
    program = apply(
        resolve(GPT).build(), plan, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2), device=this_rank().device
    )
    assert program.loss_scale is not None
    scaling.GROWTH_INTERVAL = 5
    unscale = program.loss_scale.unscale
    first = checkpoint.restore(program, "", folder, this_rank()).step if resumes else 0
    found = []
    for step in range(first, until):
        torch.manual_seed(step)
        program.loss_scale.unscale = partial(_unscale, unscale, step == SPOILT)  # type: ignore[method-assign]
        loss = program.step(resolve(GPT).example(8)).loss  # type: ignore[misc]
        found.append((loss, program.loss_scale.scale, program.loss_scale.num_good_steps))
    scaling.GROWTH_INTERVAL = 2000
    progress = Progress(step=until, cursor=0, plan=plan.hash, graph="", num_ranks=this_rank().num_ranks)
    checkpoint.save(program, progress, folder, this_rank(), keep=9)
    program.close()
    return found


def _unscale(unscale: Any, is_spoilt: bool, parameters: Iterable[nn.Parameter]) -> bool:
    given = list(parameters)
    if is_spoilt:
        local(given[-1].grad).view(-1)[0] = torch.nan  # type: ignore[arg-type]
    return bool(unscale(given))


@pytest.mark.parametrize("other", ["one", "pp2", "tp2", "offload"])
def test_the_scale_goes_on_under_another_plan(pool: Pools, tmp_path: Path, other: str) -> None:
    """Halved by a step that was left out, then doubled: at the same steps as if nothing had happened."""
    pool(2).run(run_on_rank, "dp2 zero3", tmp_path, 7, False)
    expected = pool(2).run(run_on_rank, "dp2 zero3", tmp_path / "whole", 12, False)[0]
    ranks = 1 if other in ("one", "offload") else 2
    found = pool(ranks).run(run_on_rank, other, tmp_path, 12, True)[0]
    assert [entry[1:] for entry in found] == [entry[1:] for entry in expected[7:]]
    assert [entry[1] / scaling.FIRST_SCALE for entry in expected] == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1, 1, 1]
    assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in expected[7:]], rel=BAND)


def wrap_on_rank(case: Case) -> None:
    module = source_of(case.model).build()
    wrap(module, torch.optim.AdamW(module.parameters()), plan_of(case), this_rank().device)


def test_a_loop_of_ones_own_must_scale_its_own_loss(pool: Pools) -> None:
    with pytest.raises(RankError, match="fp16 scales the loss, which with wrap is your own loop's: use apply, or bf16"):
        pool(2).run(wrap_on_rank, Case("gpt", 0, "none", 1, "fp16"))
