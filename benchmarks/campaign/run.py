"""One run with its faults, from the first to the verdict."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from campaign.fault import Fault, Outcome, ProblemError
from campaign.judge import Expected, left_files, wrong_figures, wrong_state
from campaign.kinds import KINDS
from campaign.plans import STEPS
from campaign.scene import Scene, StuckError

AGAIN = "the same error came back after a restart"
"""A run that raises twice at one step is not restarted: that is right, and --resume goes on."""
MOST_STARTS = 5
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Verdict:
    faults: list[Fault] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """Kinds that found nothing to break, or came too late."""
    orphans: int = 0
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Figures that differ."""
    lost_steps: int = 0
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return not (self.problem or self.orphans or self.left or self.wrong)


def alone(scene: Scene) -> None:
    """A run that nothing happens to."""
    scene.go_on()
    if scene.end():
        raise SystemExit(f"the run of plan '{scene.plan.name}' that was left alone failed:\n{scene.said()}")


def with_faults(scene: Scene, kinds: Sequence[str], chance: random.Random, expected: Expected) -> Verdict:
    verdict = Verdict()
    try:
        _put_all(scene, kinds, chance, verdict)
        _finish(scene, verdict)
        _judge(scene, expected, verdict)
    except (ProblemError, StuckError, OSError) as error:
        verdict.problem = str(error)
    verdict.missed += kinds[len(verdict.faults) + len(verdict.missed) :]
    verdict.orphans = len(scene.orphans()) if not scene.is_running else 0
    verdict.lost_steps = scene.lost_steps + _noted_losses(scene.out)
    for fault in verdict.faults:
        fault.is_right = verdict.is_right
    return verdict


def _put_all(scene: Scene, kinds: Sequence[str], chance: random.Random, verdict: Verdict) -> None:
    for kind in kinds:
        began = time.monotonic()
        fault = Fault(scene.plan.name, kind, "", Outcome.RECOVERED, 0.0)
        verdict.faults.append(fault)
        put = KINDS[kind](scene, chance)
        fault.outcome, fault.detail, fault.seconds = put.outcome, put.detail, time.monotonic() - began
        if put.outcome is Outcome.MISSED:
            verdict.missed.append(kind)
            verdict.faults.remove(fault)
        if scene.is_scattered or _is_done(scene):
            return


def _is_done(scene: Scene) -> bool:
    return not scene.is_running and scene.newest_step() == STEPS


def _finish(scene: Scene, verdict: Verdict) -> None:
    """Whatever is left to do of the run is done, by the command that runs or by --resume."""
    if scene.is_scattered:
        return
    for _ in range(MOST_STARTS):
        before = len(scene.said())
        scene.go_on()
        if scene.end() == 0:
            return
        if AGAIN not in scene.said()[before:]:
            raise ProblemError(f"exit code {scene.end()} with nothing in its way")
        scene.note_loss()
    raise ProblemError(f"not at its end after {MOST_STARTS} starts")


def _judge(scene: Scene, expected: Expected, verdict: Verdict) -> None:
    if TRACEBACK in scene.said():
        raise ProblemError("a traceback was printed")
    ended_badly = scene.is_scattered and scene.end() != 0
    verdict.left = left_files(scene)
    verdict.wrong = wrong_figures(scene, expected)
    if not ended_badly and (problem := wrong_state(scene, expected)):
        raise ProblemError(problem)


def _noted_losses(out: Path) -> int:
    """Steps that restarts had to do again."""
    with suppress(OSError, ValueError):
        noted = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
        return sum(max(0, line["step"] - line["resumed_step"]) for line in noted if line.get("step") is not None)
    return 0


def keep(scene: Scene, folder: Path) -> Path:
    """A copy of what a run left, for who wants to know why."""
    target = folder / scene.folder.name
    shutil.copytree(scene.folder, target, symlinks=True, ignore_dangling_symlinks=True, dirs_exist_ok=True)
    return target
