"""fp16: the loss is scaled, ranks agree on which updates to leave out, the scale is part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, graph_of, plan_of, source_of
from pool import RankError, RankPool, this_rank
from test_collectives_and_memory import check_collectives_and_state

from meshwright.models.objective import DEFAULT, Objective
from meshwright.runtime import scaling
from meshwright.runtime.apply import apply, wrap
from meshwright.runtime.clip import local
from meshwright.runtime.program import Program
from meshwright.train import checkpoint
from meshwright.train.checkpoint import Progress

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


def wrap_on_rank(case: Case) -> None:
    module = source_of(case.model).build()
    wrap(module, torch.optim.AdamW(module.parameters()), plan_of(case), this_rank().device)


def test_a_loop_of_ones_own_must_scale_its_own_loss(pool: Pools) -> None:
    with pytest.raises(RankError, match="fp16 scales the loss, which with wrap is your own loop's: use apply, or bf16"):
        pool(2).run(wrap_on_rank, Case("gpt", 0, "none", 1, "fp16"))
