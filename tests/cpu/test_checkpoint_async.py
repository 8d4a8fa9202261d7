"""Checkpoints beside training: what is written is the state of when it began, and no rank waits in vain when something fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import ZERO_STAGES, Case
from pool import RankError, RankPool, this_rank
from test_checkpoint import AFTER, BEFORE, case_of, progress_of, resume, start, steps

from meshwright.core.errors import CheckpointError
from meshwright.training import staging, writing
from meshwright.training.checkpoint import restore
from meshwright.training.kept import latest
from meshwright.training.saver import Saver
from meshwright.training.saving import Home, Saving
from meshwright.training.settings import CheckpointSettings

Pools = Callable[[int], RankPool]


def saver_of(program: Any, folder: Path, asynchronous: bool = True) -> Saver:
    return Saver(program, folder, this_rank(), keep=2, asynchronous=asynchronous)


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    may_write, real = threading.Event(), writing.write_tensors

    def write(*arguments: Any) -> Any:
        assert may_write.wait(60)
        return real(*arguments)

    with mock.patch.object(writing, "write_tensors", write):
        yield may_write


def train_while_it_is_written(case: Case, folder: Path) -> tuple[list[float], list[str]]:
    """Steps run while nothing can be written yet."""
    program = start(case)
    steps(program, case, 0, BEFORE)
    saver = saver_of(program, folder)
    with slow_disk() as may_write:
        saver.begin(progress_of(program, BEFORE))
        found = steps(program, case, BEFORE, AFTER)
        torch.distributed.barrier()
        seen = [path.name for path in folder.iterdir()]
        torch.distributed.barrier()
        may_write.set()
        assert saver.settle() == folder / f"step-{BEFORE:08d}"
    saver.close()
    return found, seen


@pytest.mark.parametrize("zero", ZERO_STAGES)
@pytest.mark.parametrize("model", ["gpt", "frozen"])
def test_steps_go_on_and_the_state_is_that_of_before(pool: Pools, tmp_path: Path, model: str, zero: int) -> None:
    case = case_of(model, zero)
    answers = pool(2).run(train_while_it_is_written, case, tmp_path)
    for _, seen in answers:
        assert seen == [f".step-{BEFORE:08d}.draft"], "it was visible before it was whole"
    for progress, losses in pool(2).run(resume, case, tmp_path):
        assert (progress.step, losses) == (BEFORE, answers[0][0])


def save_several(folder: Path) -> list[str]:
    case = case_of("odd", 2)
    program = start(case)
    saver = saver_of(program, folder)
    for step in range(1, 5):
        steps(program, case, step, 1)
        saver.settle()
        saver.begin(progress_of(program, step))
    saver.settle()
    saver.close()
    return sorted(path.name for path in folder.iterdir())


def test_one_after_the_other_in_the_same_memory(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(save_several, tmp_path) == [["step-00000003", "step-00000004"]] * 2


def begin_twice(folder: Path) -> None:
    program = start(case_of("odd"))
    saver = saver_of(program, folder)
    saver.begin(progress_of(program, 1))
    try:
        saver.begin(progress_of(program, 2))
    finally:
        saver.settle()


def test_one_at_a_time(pool: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="a checkpoint is under way: settle first"):
        pool(2).run(begin_twice, tmp_path)


# What fails


def no_space(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def fail_in_the_thread(folder: Path, failing: tuple[int, ...], note_fails: bool) -> tuple[str, list[str]]:
    """Some ranks cannot write; with `note_fails` they cannot even say so."""
    program = start(case_of("odd", 3))
    saver = saver_of(program, folder)
    saver.begin(progress_of(program, 1))
    saver.settle()
    said = ""
    is_failing = this_rank().number in failing
    with (
        mock.patch.object(writing, "write_tensors", no_space if is_failing else writing.write_tensors),
        mock.patch.object(writing.Writing, "_leave", no_space if is_failing and note_fails else writing.Writing._leave),
    ):
        saver.begin(progress_of(program, 2))
        try:
            saver.settle()
        except CheckpointError as error:
            said = str(error)
    saver.begin(progress_of(program, 3))
    saver.settle()
    saver.close()
    return said, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("note_fails", [False, True])
@pytest.mark.parametrize("failing", [(0,), (1,)])
def test_every_rank_learns_of_a_failure(
    pool: Pools, tmp_path: Path, failing: tuple[int, ...], note_fails: bool
) -> None:
    for said, names in pool(2).run(fail_in_the_thread, tmp_path, failing, note_fails):
        assert said == (
            f"checkpoint of step 2 could not be written to {tmp_path}: rank {failing[0]}: OSError: [Errno 28] No space left on "
            "device; the previous checkpoint, step-00000001, is whole"
        )
        assert names == ["step-00000001", "step-00000003"]


def fail_on_the_way(folder: Path, asynchronous: bool) -> tuple[list[str], str]:
    program = start(case_of("odd"))
    warnings: list[str] = []
    settings = CheckpointSettings(asynchronous=asynchronous, wait_seconds=0)
    saving = Saving(program, Home(folder), this_rank(), settings, {}, warnings.append)
    with mock.patch.object(writing, "write_tensors", no_space):
        saving.on_the_way(progress_of(program, 1))
        num_before = len(warnings)
        assert num_before == (0 if asynchronous else 1)
        saving.on_the_way(progress_of(program, 2))
    try:
        with mock.patch.object(writing, "write_tensors", no_space):
            saving.last(progress_of(program, 3))
    except CheckpointError as error:
        return warnings, str(error)
    finally:
        saving.close()
    return warnings, ""


@pytest.mark.parametrize("asynchronous", [True, False])
def test_on_the_way_a_failure_is_a_warning_and_at_the_end_an_error(
    pool: Pools, tmp_path: Path, asynchronous: bool
) -> None:
    for said, error in pool(2).run(fail_on_the_way, tmp_path, asynchronous):
        warnings = [text for text in said if text.startswith("warning")]
        assert [text.partition(" could")[0] for text in warnings] == [
            "warning: checkpoint of step 1",
            "warning: checkpoint of step 2",
        ]
        assert all(text.endswith("Training goes on, and it will be tried again.") for text in warnings)
        assert error.startswith("checkpoint of step 3 could not be written")


def leave_alone(folder: Path) -> list[str]:
    """The other rank is gone, as after an error: the first does not wait for it forever."""
    program = start(case_of("odd", 3))
    saver = saver_of(program, folder)
    write = writing.write_tensors if this_rank().is_first else no_space
    leave = writing.Writing._leave if this_rank().is_first else no_space
    with mock.patch.object(writing, "write_tensors", write), mock.patch.object(writing.Writing, "_leave", leave):
        saver.begin(progress_of(program, 1))
        saver.close(grace_seconds=0.1)
    return [] if latest(folder) is None else [latest(folder).name]  # type: ignore[union-attr]


def test_after_an_error_nobody_waits_for_ranks_that_are_gone(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(leave_alone, tmp_path) == [[], []]


def save_without_memory(folder: Path) -> tuple[bool, bool]:
    """Whether it was whole before `settle`, and whether memory was held for a copy."""
    case = case_of("odd", 3)
    program = start(case)
    steps(program, case, 0, BEFORE)
    saver = saver_of(program, folder)
    available = 0 if this_rank().number == 1 else 2**40
    with mock.patch.object(staging, "available_bytes", return_value=available):
        saver.begin(progress_of(program, BEFORE))
    torch.distributed.barrier()
    is_whole = latest(folder) is not None
    held = saver.staging is not None and saver.staging._room.numel() > 0
    steps(program, case, BEFORE, AFTER)
    saver.settle()
    saver.close()
    return is_whole, held


def test_where_one_host_has_no_memory_for_a_copy_all_write_at_once(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(save_without_memory, tmp_path) == [(True, False)] * 2
    expected = pool(2).run(losses_of_before, case_of("odd", 3))[0]
    for progress, losses in pool(2).run(resume, case_of("odd", 3), tmp_path):
        assert (progress.step, losses) == (BEFORE, expected)


def losses_of_before(case: Case) -> list[float]:
    return steps(start(case), case, 0, BEFORE + AFTER)[BEFORE:]


def fail_to_copy(folder: Path) -> tuple[str, list[str]]:
    """The second checkpoint goes by the plan of the first: a rank that fails then is alone with it."""
    program = start(case_of("odd", 3))
    saver = saver_of(program, folder)
    saver.save(progress_of(program, 1))
    said = ""
    fails = mock.patch.object(staging.Staging, "copy", side_effect=MemoryError("no page left"))
    with fails if this_rank().number == 1 else nullcontext():
        try:
            saver.save(progress_of(program, 2))
        except CheckpointError as error:
            said = str(error)
    saver.save(progress_of(program, 3))
    saver.close()
    return said, sorted(path.name for path in folder.iterdir())


def test_a_rank_that_cannot_copy_its_part(pool: Pools, tmp_path: Path) -> None:
    for said, names in pool(2).run(fail_to_copy, tmp_path):
        assert f"step 2 could not be written to {tmp_path}: rank 1: MemoryError: no page left" in said
        assert names == ["step-00000001", "step-00000003"]


def save_changing_settings(folder: Path) -> float:
    """What is no tensor changes from one checkpoint to the next."""
    program = start(case_of("odd", 3))
    saver = saver_of(program, folder)
    for step in (1, 2):
        for group in program.optimizer.param_groups:
            group["lr"] = step / 10
        saver.save(progress_of(program, step))
    other = start(case_of("odd", 3), seed=99)
    restore(other, other.plan.graph, folder, this_rank())
    saver.close()
    return float(other.optimizer.param_groups[0]["lr"])


def test_values_are_those_of_now(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(save_changing_settings, tmp_path) == [0.2, 0.2]
