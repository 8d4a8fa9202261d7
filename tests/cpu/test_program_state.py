"""`mw.save` and `mw.load`: a loop of one's own goes on where it stopped, under the same plan or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import ZERO_STAGES
from pool import RankPool
from test_checkpoint import AFTER, BEFORE, case_of, start, steps

import meshwright as mw
from meshwright.core.errors import CheckpointError, InputError

Pools = Callable[[int], RankPool]


def run_and_save(folder: str, zero: int, num_ranks: int) -> list[float]:
    """What the losses after the checkpoint are, where nothing is interrupted."""
    case = case_of(zero=zero, num_ranks=num_ranks)
    with start(case) as program:
        steps(program, case, 0, BEFORE)
        path = mw.save(program, folder, step=BEFORE)
        assert path.name == f"step-{BEFORE:08d}"
        return steps(program, case, BEFORE, AFTER)


def load_and_go_on(folder: str, zero: int, num_ranks: int) -> list[float]:
    case = case_of(zero=zero, num_ranks=num_ranks)
    with start(case, seed=1) as program:
        step = mw.load(program, folder)
        assert (step, program.first_step) == (BEFORE, BEFORE)
        return steps(program, case, step, AFTER)


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_a_loop_goes_on_bit_for_bit(pool: Pools, zero: int, tmp_path: Path) -> None:
    expected = pool(2).run(run_and_save, str(tmp_path), zero, 2)
    assert pool(2).run(load_and_go_on, str(tmp_path), zero, 2) == expected


def test_another_plan_goes_on_from_it(pool: Pools, tmp_path: Path) -> None:
    expected = pool(2).run(run_and_save, str(tmp_path), 3, 2)[0]
    (found,) = pool(1).run(load_and_go_on, str(tmp_path), 0, 1)
    assert found == pytest.approx(expected, rel=1e-12)


def refusals(folder: str) -> list[str]:
    said = []
    with start(case_of(num_ranks=1)) as program:
        for ask in (lambda: mw.load(program, folder), lambda: mw.save(program, folder, step=-1)):
            try:
                ask()
            except (CheckpointError, InputError) as error:
                said.append(str(error))
    return said


def test_what_cannot_be_loaded_or_saved_is_refused(pool: Pools, tmp_path: Path) -> None:
    ((loading, saving),) = pool(1).run(refusals, str(tmp_path))
    assert str(tmp_path) in loading
    assert "step=-1" in saving
