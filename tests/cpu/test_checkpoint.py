"""Checkpoints: the next losses are those of the run that was not interrupted, on any number of ranks; never half of one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import ZERO_STAGES, Case, plan_of, source_of
from pool import RankError, RankPool, this_rank

from meshwright.core.graph import Precision
from meshwright.runtime.apply import apply
from meshwright.runtime.program import Program
from meshwright.training import checkpoint
from meshwright.training.checkpoint import Progress, latest, restore, save
from meshwright.training.kept import clear_left, remove

Pools = Callable[[int], RankPool]

GLOBAL_BATCH = 8
BEFORE, AFTER = 2, 3
"""Steps before and after the checkpoint."""
ADAM = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=1e-2)


def case_of(model: str = "gpt", zero: int = 0, num_ranks: int = 2, precision: Precision = "fp64") -> Case:
    return Case(model, zero, "none", 1, precision, samples=GLOBAL_BATCH // num_ranks)


def start(case: Case, seed: int = 0, optimizer: Any = ADAM) -> Program:
    torch.manual_seed(seed)
    source = source_of(case.model)
    return apply(
        source.build(), plan_of(case), optimizer=optimizer, objective=source.objective, device=this_rank().device
    )


def batch_of(case: Case, step: int) -> Any:
    """Samples of one step, the same whatever the number of ranks."""
    make = source_of(case.model).example
    assert make is not None
    many = make((step + 1) * GLOBAL_BATCH)
    cut = slice(step * GLOBAL_BATCH, None)
    return {n: t[cut] for n, t in many.items()} if isinstance(many, dict) else tuple(t[cut] for t in many)


def steps(program: Program, case: Case, first: int, count: int) -> list[float]:
    return [program.step(batch_of(case, step)).loss for step in range(first, first + count)]


def progress_of(program: Program, step: int) -> Progress:
    plan = program.plan
    return Progress(step=step, cursor=step * GLOBAL_BATCH, plan=plan.hash, graph=plan.graph, num_ranks=plan.world)


def write(program: Program, step: int, folder: Path, keep: int = 2) -> Path:
    return save(program, progress_of(program, step), folder, this_rank(), keep)


def run_and_save(case: Case, folder: Path, optimizer: Any = ADAM) -> list[float]:
    """Train, save, and go on; the losses after the checkpoint."""
    program = start(case, optimizer=optimizer)
    steps(program, case, 0, BEFORE)
    write(program, BEFORE, folder)
    return steps(program, case, BEFORE, AFTER)


def resume(case: Case, folder: Path, optimizer: Any = ADAM) -> tuple[Progress, list[float]]:
    """Other weights, then what the checkpoint holds."""
    program = start(case, seed=99, optimizer=optimizer)
    progress = restore(program, program.plan.graph, folder, this_rank())
    return progress, steps(program, case, progress.step, AFTER)


# Where the run was, it goes on.


@pytest.mark.parametrize("zero", ZERO_STAGES)
@pytest.mark.parametrize("model", ["gpt", "frozen", "unused"])
def test_the_same_ranks_go_on_exactly(pool: Pools, tmp_path: Path, model: str, zero: int) -> None:
    case = case_of(model, zero)
    expected, _ = pool(2).run(run_and_save, case, tmp_path)
    for progress, losses in pool(2).run(resume, case, tmp_path):
        assert losses == expected
        assert (progress.step, progress.cursor, progress.num_ranks) == (BEFORE, BEFORE * GLOBAL_BATCH, 2)
    assert len(set(expected)) == AFTER


@pytest.mark.parametrize(
    ("model", "saved_zero", "num_ranks", "zero"),
    [
        ("gpt", 0, 1, 0),
        ("gpt", 3, 1, 0),
        ("gpt", 2, 2, 0),
        ("gpt", 0, 2, 3),
        ("gpt", 1, 4, 3),
        ("odd", 3, 4, 3),
        ("odd", 3, 4, 0),
        ("frozen", 3, 4, 1),
        ("tied", 3, 1, 0),
        ("tied", 0, 4, 2),
    ],
)
def test_other_ranks_go_on(pool: Pools, tmp_path: Path, model: str, saved_zero: int, num_ranks: int, zero: int) -> None:
    """Another number of ranks, another ZeRO stage: sums in another order, else the same losses."""
    expected, _ = pool(2).run(run_and_save, case_of(model, saved_zero), tmp_path)
    for _, losses in pool(num_ranks).run(resume, case_of(model, zero, num_ranks), tmp_path):
        assert losses == pytest.approx(expected, rel=1e-11)


def test_four_ranks_may_save_for_two(pool: Pools, tmp_path: Path) -> None:
    expected, *_ = pool(4).run(run_and_save, case_of("odd", 3, 4), tmp_path)
    for _, losses in pool(2).run(resume, case_of("odd", 2, 2), tmp_path):
        assert losses == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("zero", [0, 3])
def test_buffers_are_saved(pool: Pools, tmp_path: Path, zero: int) -> None:
    """Batch norm: what the first rank saw counts, after a resume as before it."""
    saved = pool(2).run(buffers_after_save, zero, tmp_path)
    restored = pool(2).run(buffers_after_restore, zero, tmp_path)
    assert saved[0] == saved[1] == restored[0] == restored[1]
    assert saved[0][1] == BEFORE, "num_batches_tracked of the first batch norm"


def buffers_after_save(zero: int, folder: Path) -> tuple[float, int]:
    case = case_of("resnet", zero)
    program = start(case)
    steps(program, case, 0, BEFORE)
    write(program, BEFORE, folder)
    return buffer_facts(program)


def buffers_after_restore(zero: int, folder: Path) -> tuple[float, int]:
    program = start(case_of("resnet", zero), seed=99)
    restore(program, program.plan.graph, folder, this_rank())
    return buffer_facts(program)


def buffer_facts(program: Program) -> tuple[float, int]:
    named = dict(program.module.named_buffers())
    means = sum(float(tensor.double().abs().sum()) for name, tensor in named.items() if name.endswith("running_mean"))
    return means, int(named["stem.1.num_batches_tracked"])


@pytest.mark.parametrize("zero", [0, 2])
def test_random_states_are_saved(pool: Pools, tmp_path: Path, zero: int) -> None:
    """Dropout draws after a resume what it would have drawn."""
    case = case_of("gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61,dropout=0.5", zero, precision="fp32")
    expected, _ = pool(2).run(run_and_save, case, tmp_path)
    for _, losses in pool(2).run(resume, case, tmp_path):
        assert losses == expected


@pytest.mark.parametrize("zero", [0, 3])
def test_an_optimizer_without_state(pool: Pools, tmp_path: Path, zero: int) -> None:
    case = case_of("gpt", zero)
    expected, _ = pool(2).run(run_and_save, case, tmp_path, SGD)
    for _, losses in pool(2).run(resume, case, tmp_path, SGD):
        assert losses == expected


def validate_then_save(zero: int, folder: Path) -> tuple[list[float], list[float]]:
    """What the loop does between two steps; losses with and without it."""
    case = case_of("gpt", zero)
    plain, program = start(case), start(case)
    steps(plain, case, 0, BEFORE)
    steps(program, case, 0, BEFORE)
    program.evaluate([batch_of(case, 7)])
    write(program, BEFORE, folder)
    return steps(plain, case, BEFORE, AFTER), steps(program, case, BEFORE, AFTER)


@pytest.mark.parametrize("zero", ZERO_STAGES)
def test_a_checkpoint_right_after_validation(pool: Pools, tmp_path: Path, zero: int) -> None:
    (plain, disturbed), _ = pool(2).run(validate_then_save, zero, tmp_path)
    assert disturbed == plain
    for _, losses in pool(2).run(resume, case_of("gpt", zero), tmp_path):
        assert losses == plain


# Whole or not at all.


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Writing past the limit fails, as on a full disk."""
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


def fail_halfway(zero: int, folder: Path, failing: tuple[int, ...]) -> tuple[str, list[str], list[float]]:
    """A good checkpoint, one that some ranks cannot write, then training goes on."""
    case = case_of("gpt", zero)
    program = start(case)
    steps(program, case, 0, BEFORE)
    write(program, BEFORE, folder)
    losses = steps(program, case, BEFORE, 1)
    said = ""
    try:
        with small_files(4096 if this_rank().number in failing else resource.RLIM_INFINITY):
            write(program, BEFORE + 1, folder)
    except checkpoint.CheckpointError as error:
        said = str(error)
    torch.distributed.barrier()
    names = sorted(path.name for path in folder.iterdir())
    torch.distributed.barrier()
    return said, names, losses + steps(program, case, BEFORE + 1, AFTER - 1)


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_write_that_fails_halfway(pool: Pools, tmp_path: Path, zero: int, failing: tuple[int, ...]) -> None:
    """Every rank learns of it, the previous checkpoint stays, and the run can go on."""
    answers = pool(2).run(fail_halfway, zero, tmp_path, failing)
    for said, names, _ in answers:
        assert said.startswith(
            f"checkpoint of step {BEFORE + 1} could not be written to {tmp_path}: rank {failing[-1]}: OSError: [Errno 27]"
        )
        assert said.endswith("the previous checkpoint, step-00000002, is whole")
        assert names == ["step-00000002"]
    for progress, losses in pool(2).run(resume, case_of("gpt", zero), tmp_path):
        assert progress.step == BEFORE
        assert losses == answers[0][2]


Usage = namedtuple("Usage", "total used free")


def save_on_full_disk(folder: Path) -> None:
    program = start(case_of("gpt", 2))
    steps(program, case_of("gpt", 2), 0, 1)
    with mock.patch.object(shutil, "disk_usage", return_value=Usage(100, 90, 10)):
        write(program, 1, folder)


def test_a_full_disk_is_noticed_before_writing(pool: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        pool(2).run(save_on_full_disk, tmp_path)
    for said in caught.value.errors.values():
        assert said.startswith("UnwrittenError: checkpoint of step 1 could not be written to")
        assert "the disk is full: " in said
        assert said.endswith("there is no earlier checkpoint")
    assert list(tmp_path.iterdir()) == []


def save_where_nothing_can_be_made(folder: Path) -> None:
    program = start(case_of("gpt", 2))
    write(program, 1, folder / "file" / "checkpoints")


def test_a_folder_that_cannot_be_made(pool: Pools, tmp_path: Path) -> None:
    """No rank hangs, all say why."""
    tmp_path.joinpath("file").write_text("in the way")
    with pytest.raises(RankError) as caught:
        pool(2).run(save_where_nothing_can_be_made, tmp_path)
    assert len(caught.value.errors) == 2
    for said in caught.value.errors.values():
        assert said.startswith("UnwrittenError: checkpoint of step 1 could not be written to")
        assert "NotADirectoryError" in said


def save_many(folder: Path, keep: int) -> list[str]:
    program = start(case_of("odd", 2))
    for step in range(1, 6):
        write(program, step, folder, keep)
    write(program, 5, folder, keep)
    return sorted(path.name for path in folder.iterdir())


def test_old_checkpoints_are_removed(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(save_many, tmp_path, 2) == [["step-00000004", "step-00000005"]] * 2


def test_a_torn_draft_is_ignored(pool: Pools, tmp_path: Path) -> None:
    """A crash leaves a draft: it is not read, and the next checkpoint removes it."""
    case = case_of("gpt", 3)
    expected, _ = pool(2).run(run_and_save, case, tmp_path)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".step-00000009.draft")
    unfinished = tmp_path / "step-00000008"
    shutil.copytree(tmp_path / "step-00000002", unfinished)
    unfinished.joinpath("manifest.json").unlink()
    assert latest(tmp_path) == tmp_path / "step-00000002"
    for progress, losses in pool(2).run(resume, case, tmp_path):
        assert progress.step == BEFORE
        assert losses == expected
    assert pool(2).run(save_step_nine, tmp_path) == [["rank-00000.safetensors", "rank-00001.safetensors"]] * 2
    assert latest(tmp_path) == tmp_path / "step-00000009"
    assert not list(tmp_path.glob(".*"))


def save_step_nine(folder: Path) -> list[str]:
    path = write(start(case_of("gpt", 3)), 9, folder)
    return sorted(item.name for item in path.glob("*.safetensors"))


def test_one_that_gives_way_counts_until_its_successor_is_there(tmp_path: Path) -> None:
    """A crash between two renames: the checkpoint that was to be replaced is the one to resume from."""
    aside = tmp_path / ".step-00000003.old"
    for path in (tmp_path / "step-00000002", aside):
        path.mkdir()
        path.joinpath("manifest.json").write_text("{}")
    assert latest(tmp_path) == aside
    tmp_path.joinpath("step-00000003").mkdir()
    tmp_path.joinpath("step-00000003/manifest.json").write_text("{}")
    assert latest(tmp_path) == tmp_path / "step-00000003"


def test_what_a_crash_left_goes_and_all_else_stays(tmp_path: Path) -> None:
    """To be removed is to lose the name first; earlier versions lost the manifest first."""
    whole = ["step-00000004", "step-00000006", ".step-00000006.old", "step-00000009.damaged", ".step-00000005.old"]
    left = [".step-00000007.draft", ".step-00000002.gone", "step-00000003", "step-00000008"]
    for name in (*whole, *left):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_text("")
    for name in whole:
        (tmp_path / name / "manifest.json").write_text("{}")
    clear_left(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000004", "step-00000006", "step-00000009.damaged", ".step-00000005.old", "step-00000008",
    }  # fmt: skip
    remove(tmp_path / "step-00000004")
    assert not list(tmp_path.glob("*4*"))


def test_the_newest_is_the_highest_step_whatever_the_clock_said(tmp_path: Path) -> None:
    for step, written in ((9, 4_000_000_000), (100, 1_000), (20, 2_000_000_000)):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        folder.joinpath("manifest.json").write_text("{}")
        os.utime(folder, (written, written))
    assert latest(tmp_path) == tmp_path / "step-00000100"


# What is refused.


def refusal(pool: RankPool, case: Case, folder: Path) -> str:
    with pytest.raises(RankError) as caught:
        pool.run(resume, case, folder)
    assert len(caught.value.errors) == pool.num_ranks
    return caught.value.errors[0]


def test_nothing_to_resume_from(pool: Pools, tmp_path: Path) -> None:
    said = refusal(pool(2), case_of(), tmp_path / "checkpoints")
    assert said == f"InputError: {tmp_path}/checkpoints holds no checkpoint to resume from: start without --resume"


def test_a_checkpoint_of_another_model(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(run_and_save, case_of("gpt"), tmp_path)
    said = refusal(pool(2), case_of("tied"), tmp_path)
    assert said.startswith(f"CheckpointError: {tmp_path}/step-00000002 is of another model (graph ")
    assert said.endswith(": names and shapes are the same, but other parameters are tied or frozen")


WIDER = "gpt:layers=2,hidden=48,heads=4,seq=16,vocab=61"
DEEPER = "gpt:layers=3,hidden=32,heads=4,seq=16,vocab=61"


@pytest.mark.parametrize(
    ("saved", "model", "words"),
    [
        ("gpt", WIDER, "'token_embedding.weight' is [61, 32] there and [61, 48] here"),
        ("gpt", DEEPER, "it lacks 'blocks.2.attention_norm.weight', which is [32] here"),
        (DEEPER, "gpt", "'blocks.2.attention_norm.weight', [32], is not in this model"),
    ],
)
def test_the_first_tensor_that_differs_is_named(
    pool: Pools, tmp_path: Path, saved: str, model: str, words: str
) -> None:
    pool(2).run(run_and_save, case_of(saved), tmp_path)
    assert refusal(pool(2), case_of(model, 3), tmp_path).endswith(words)
