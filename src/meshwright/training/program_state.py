"""A Program's state in a folder, and back: for people who keep a loop of their own around `program.step`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import rank_of
from meshwright.training.checkpoint import restore
from meshwright.training.checkpoint import save as save_checkpoint
from meshwright.training.position import Progress

KEPT = 2


def save(program: Program, folder: str | PathLike[str], *, step: int, keep: int = KEPT) -> Path:
    """Write parameters, optimizer state and random states as `folder/step-…`; every rank calls it, with the same arguments.

    step: how many steps the program has made. The newest `keep` checkpoints stay. Whole or not at all: until the new one is on the
    disk, the older ones are untouched. Any plan of the same model can load it; nothing in it is pickled.
    """
    if step < 0 or keep < 1:
        raise InputError(f"step={step}, keep={keep}: a checkpoint is of step 0 or later, and at least one is kept")
    rank, plan = rank_of(program.device), program.plan
    progress = Progress(
        step=step, cursor=step * plan.global_batch, plan=plan.hash, graph=plan.graph, num_ranks=rank.num_ranks
    )
    return save_checkpoint(program, progress, Path(folder), rank, keep)


def load(program: Program, folder: str | PathLike[str]) -> int:
    """Take the newest whole checkpoint of `folder` into the program, laid out as its plan says; returns the step that comes next.

    Every rank calls it. The model must be the one that was saved; the plan and the number of ranks may be others. Messages, and
    random numbers by sample, go on counting from that step.
    """
    progress = restore(program, program.plan.graph, Path(folder), rank_of(program.device))
    program.first_step = progress.step
    return progress.step
