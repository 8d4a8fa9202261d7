"""Faults upon the command itself: it is killed, alone or over a rank that is stopped, or told to stop. `--resume` goes on."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress

from injection import inject

from campaign.fault import MISSED, Outcome, ProblemError, Put
from campaign.judge import left_files
from campaign.moments import BOUNDARIES, START_UP, at_random
from campaign.scene import Scene

INTERRUPTED = 130


def kill_launcher(scene: Scene, chance: random.Random) -> Put:
    if not at_random(scene, chance):
        return MISSED
    _kill(scene)
    return Put(Outcome.RECOVERED)


def stop_rank_and_kill_launcher(scene: Scene, chance: random.Random) -> Put:
    """A process that is stopped sees no signal but SIGKILL."""
    if not at_random(scene, chance):
        return MISSED
    ranks = scene.ranks()
    if not ranks or not inject("stop", chance.choice(sorted(ranks)), ranks):
        return MISSED
    _kill(scene)
    return Put(Outcome.RECOVERED)


def _kill(scene: Scene) -> None:
    assert scene.command is not None
    os.kill(scene.command.pid, signal.SIGKILL)
    scene.end()
    if left := scene.orphans():
        raise ProblemError(f"{len(left)} orphans after its launcher was killed: {left}")
    scene.note_loss()


def tell_to_stop(scene: Scene, chance: random.Random) -> Put:
    """SIGINT or SIGTERM at a boundary, to the command alone, to its process group (as a terminal does) or to a rank."""
    boundary, whom = chance.choice(sorted(BOUNDARIES)), chance.choice(("command", "group", "rank"))
    number = chance.choice((signal.SIGINT, signal.SIGTERM))
    scene.go_on()
    if not BOUNDARIES[boundary](scene):
        return MISSED
    before = len(scene.said())
    with suppress(ProcessLookupError):
        _send(scene, whom, number)
    code = scene.end()
    detail = f"{number.name} at {boundary}"
    if code not in (0, INTERRUPTED):
        raise ProblemError(f"exit code {code} after {detail}: {scene.said()[before:][-2000:]}")
    if left := scene.orphans():
        raise ProblemError(f"{len(left)} orphans after {detail}: {left}")
    if left := left_files(scene):
        raise ProblemError(f"left after {detail}: {left}")
    if boundary == START_UP:
        return Put(Outcome.RECOVERED, detail)
    if lost := max(0, scene.num_steps() - scene.newest_step()):
        raise ProblemError(f"{lost} steps lost after {detail}: the newest checkpoint is of step {scene.newest_step()}")
    return Put(Outcome.RECOVERED, detail)


def _send(scene: Scene, whom: str, number: int) -> None:
    assert scene.command is not None
    ranks = scene.ranks()
    if whom == "rank" and ranks:
        os.kill(ranks[max(ranks)], number)
    elif whom == "group":
        os.killpg(scene.command.pid, number)
    else:
        os.kill(scene.command.pid, number)
