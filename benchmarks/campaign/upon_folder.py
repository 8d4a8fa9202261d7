"""Faults upon the folder of a run: its disk is full or read-only, it is moved or removed, a second run comes into it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from campaign.fault import MISSED, Outcome, ProblemError, Put
from campaign.judge import check_whole
from campaign.moments import at_random, past_two_checkpoints
from campaign.mounts import empty, fill, read_only
from campaign.scene import Scene
from campaign.upon_ranks import lose_rank
from meshwright.training.kept import all_of

UNWRITTEN = "could not be written to"
WAITS = "the run has ended, and waits for a disk"
REFUSED, IN_USE = 2, "is in use"
MOVED_SECONDS = 3.0
AFTER_KILL_SECONDS = 3.0


@contextmanager
def _full(disk: Path) -> Iterator[None]:
    fill(disk)
    try:
        yield
    finally:
        empty(disk)


def fill_disk(scene: Scene, chance: random.Random) -> Put:
    return _without_writing(scene, chance, _full)


def make_read_only(scene: Scene, chance: random.Random) -> Put:
    return _without_writing(scene, chance, read_only)


def _without_writing(scene: Scene, chance: random.Random, held: Callable[[Path], object]) -> Put:
    """Until a save has failed, or until the run waits at its end, or while a rank is lost too."""
    if not at_random(scene, chance):
        return MISSED
    before = len(scene.said())
    way = chance.choice(("a save", "the end", "and a rank"))
    with held(scene.disk):  # type: ignore[attr-defined]
        if way == "a save":
            scene.wait_or_end(lambda: UNWRITTEN in scene.said()[before:], "a save that fails")
        elif way == "the end":
            scene.wait_or_end(lambda: WAITS in scene.said()[before:], "a run that waits")
        elif lose_rank("kill", scene, chance):
            time.sleep(chance.uniform(0.0, AFTER_KILL_SECONDS))
    return _result(scene, way, before)


def _result(scene: Scene, way: str, before: int) -> Put:
    """Once it has done a further step, or has ended: then it has to have said why, and to be whole."""
    done = scene.num_steps()
    scene.wait_or_end(lambda: scene.is_stepping() and scene.num_steps() > done, "a further step, or the end")
    if scene.is_running or scene.end() == 0:
        return Put(Outcome.RECOVERED, way)
    if "error: " not in scene.said()[before:]:
        raise ProblemError(f"exit code {scene.end()} without a word ({way})")
    check_whole(scene.out)
    scene.note_loss()
    return Put(Outcome.ENDED, way)


def rename_folder(scene: Scene, chance: random.Random) -> Put:
    """And back after a while, if nothing has come into its place."""
    if not at_random(scene, chance):
        return MISSED
    before, away = len(scene.said()), scene.disk / "away"
    os.rename(scene.out, away)
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, MOVED_SECONDS))
        if not scene.out.exists():
            os.rename(away, scene.out)
            return _result(scene, "and back", before)
    return _scattered(scene, "for good", before)


def remove_folder(scene: Scene, chance: random.Random) -> Put:
    if not at_random(scene, chance):
        return MISSED
    before = len(scene.said())
    while scene.out.exists() and "settings.toml" in os.listdir(scene.out):
        shutil.rmtree(scene.out, ignore_errors=True)
    return _scattered(scene, "", before)


PARTS = ("checkpoints", "newest", "metrics.jsonl", "run.lock", "run.json", "settings.toml", "plan.json", "live")


def remove_part(scene: Scene, chance: random.Random) -> Put:
    """A file of a run that lives, or a folder in it; then, or not, a rank is lost."""
    if not at_random(scene, chance):
        return MISSED
    before, part = len(scene.said()), chance.choice(PARTS)
    found = all_of(scene.out / "checkpoints")
    path = found[-1] if part == "newest" and found else scene.out / part
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    scene.lacks_lines |= part == "metrics.jsonl"
    if chance.random() < 0.5:
        lose_rank("kill", scene, chance)
        time.sleep(chance.uniform(0.0, AFTER_KILL_SECONDS))
    return _result(scene, part, before)


def _scattered(scene: Scene, way: str, before: int) -> Put:
    """To its end: what it writes from now on lies in a new folder, or nowhere."""
    scene.is_scattered = True
    if scene.end() == 0:
        return Put(Outcome.RECOVERED, way)
    if "error: " not in scene.said()[before:]:
        raise ProblemError(f"exit code {scene.end()} without a word")
    for folder in (scene.out, scene.disk / "away"):
        check_whole(folder)
    return Put(Outcome.ENDED, way)


def start_second(scene: Scene, chance: random.Random) -> Put:
    """A second command upon a run that lives is refused; of two that resume at once, one is."""
    way = chance.choice(("train", "--resume", "two --resume"))
    if way == "two --resume":
        return _two_at_once(scene)
    if not at_random(scene, chance):
        return MISSED
    first, before = scene.go_on(), len(scene.said())
    anew = (str(scene.settings), "--out", str(scene.out))
    second = scene.spawn(*(anew if way == "train" else ("--resume", str(scene.out))))
    scene.wait(lambda: second.poll() is not None or first.poll() is not None, "the second command to be refused")
    if second.poll() is None:
        return _too_late(scene, second)
    _check_refused(scene, second.returncode, before)
    return Put(Outcome.RECOVERED, way)


def _two_at_once(scene: Scene) -> Put:
    if not past_two_checkpoints(scene):
        return MISSED
    assert scene.command is not None
    os.kill(scene.command.pid, signal.SIGKILL)
    scene.end()
    scene.note_loss()
    before = len(scene.said())
    both = [scene.spawn("--resume", str(scene.out)) for _ in range(2)]
    scene.wait(lambda: any(one.poll() is not None for one in both), "one of two to be refused")
    first, second = sorted(both, key=lambda one: one.poll() is not None)
    scene.command = first
    if second.returncode == 0:
        return MISSED  # it was done before the other had begun
    _check_refused(scene, second.returncode, before)
    return Put(Outcome.RECOVERED, "two --resume")


def _check_refused(scene: Scene, code: int, before: int) -> None:
    said = scene.said()[before:]
    if code != REFUSED or (IN_USE not in said and "holds no checkpoint" not in said):
        raise ProblemError(f"a second command ended with {code}: {said[-2000:]}")


def _too_late(scene: Scene, second: object) -> Put:
    """The first has ended meanwhile: the second has the folder for itself, and goes on there."""
    scene.command = second  # type: ignore[assignment]
    scene.end()
    return MISSED
