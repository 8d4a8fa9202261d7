"""Whatever is wrong with a checkpoint is named before a program changes, and nothing is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from damages import DAMAGES
from pool import RankPool, this_rank
from test_reshard import TIED, losses, plan_of, start, write

from meshwright.core.errors import CheckpointError
from meshwright.core.plan import Plan
from meshwright.runtime.clip import local
from meshwright.runtime.program import Program
from meshwright.training.checked.parts import fills
from meshwright.training.checkpoint import restore

Pools = Callable[[int], RankPool]
NEWEST, OLDER = "step-00000002", "step-00000001"
PLANS = {"dp2": 2, "zero3": 2, "pp2 tp2": 4, "host optimizer zero3": 2}


def two_checkpoints(plan: Plan, folder: Path) -> None:
    program = start(TIED, plan, seed=0)
    for step in (1, 2):
        losses(program, TIED, step - 1, 1)
        write(program, step, folder / str(step))
    program.close()


def bits(program: Program) -> list[bytes]:
    if program.host is not None:
        program.host.settle()  # its updates may still be under way
    named = sorted(program.module.named_parameters())
    return [
        local(one.detach()).cpu().contiguous().view(torch.uint8).numpy().tobytes() for _, one in named if one.numel()
    ]


def restore_each(plan: Plan, folders: list[Path]) -> list[tuple[str, int, bool]]:
    """For each folder: what was said or refused, the step it went on from (0: none), and whether the program changed."""
    program, found = start(TIED, plan, seed=99), []
    losses(program, TIED, 3, 1)
    for folder in folders:
        said: list[str] = []
        before = bits(program)
        try:
            step = restore(program, plan.graph, folder, this_rank(), said.append).step
        except CheckpointError as error:
            said, step = [str(error)], 0
        found.append((" ".join(said), step, before != bits(program)))
        program.optimizer.param_groups[0]["lr"] = 1e-2
        losses(program, TIED, 3, 1)
    program.close()
    return found


@pytest.mark.parametrize("name", PLANS)
def test_every_damage_is_named(pool: Pools, tmp_path: Path, name: str) -> None:
    plan, ranks = plan_of(TIED, name), pool(PLANS[name])
    ranks.run(two_checkpoints, plan, tmp_path / "saved")
    folders = []
    for number, damage in enumerate(DAMAGES.values()):
        folders.append(tmp_path / str(number))
        shutil.copytree(tmp_path / "saved" / "1" / OLDER, folders[-1] / OLDER)
        shutil.copytree(tmp_path / "saved" / "2" / NEWEST, folders[-1] / NEWEST)
        damage.do(folders[-1] / NEWEST)
    answers = ranks.run(restore_each, plan, folders)
    for place, (kind, damage) in enumerate(DAMAGES.items()):
        said, step, changed = answers[0][place]
        ended = (kind, said, step)
        if damage.ending == "harmless":
            assert (said, step) == ("", 2), ended
            continue
        assert damage.words in said, ended
        assert [answer[place][1] for answer in answers] == [step] * len(answers), ended
        assert step == (1 if damage.ending == "set aside" else 0), ended
        assert step or not changed, ended
        kept = f"{NEWEST}.damaged" if damage.ending == "set aside" else NEWEST
        assert (folders[place] / kept).is_dir(), ended


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((), [((), ())], True),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4,), [((0,), (2,)), ((0,), (2,))], False),
        ((4,), [((0,), (3,)), ((3,), (0,)), ((3,), (1,))], True),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], True),
        ((4, 4), [((0, 0), (2, 2)), ((2, 2), (2, 2)), ((0, 0), (2, 2)), ((2, 2), (2, 2))], False),
        ((0, 3), [], True),
    ],
)
def test_parts_fill_a_whole(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], expected: bool
) -> None:
    assert fills(shape, boxes) == expected
    if shape:
        seen = [sum(_is_in(place, box) for box in boxes) for place in product(*map(range, shape))]
        assert (set(seen) <= {1}) == expected


def _is_in(place: tuple[int, ...], box: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    return all(start <= at < start + size for at, start, size in zip(place, *box, strict=True))
