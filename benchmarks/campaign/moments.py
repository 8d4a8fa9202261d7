"""When a fault comes: at a random moment of a run, or at one of its boundaries. Steps are counted, not seconds: machines differ."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from campaign.plans import STEPS, VALIDATE_EVERY
from campaign.scene import Scene
from meshwright.core.errors import MeshwrightError
from meshwright.training.lock import Holder

STARTING_SHARE = 0.2
"""Of the faults, those that come while ranks start."""
STARTING_SECONDS = 2.0
MOST_FURTHER_STEPS = 6


def at_random(scene: Scene, chance: random.Random) -> bool:
    """With ranks there; False where the run comes to its end before."""
    scene.go_on()
    if not scene.wait_or_end(lambda: len(scene.ranks()) > 0, "ranks"):
        return False
    if chance.random() < STARTING_SHARE:
        time.sleep(chance.uniform(0.0, STARTING_SECONDS))
        return scene.is_running
    reached = scene.num_steps() + chance.randint(1, MOST_FURTHER_STEPS)
    return scene.wait_or_end(lambda: scene.num_steps() >= reached and scene.ranks(), f"step {reached}")


def past_two_checkpoints(scene: Scene) -> bool:
    scene.go_on()
    folder = scene.out / "checkpoints"
    return scene.wait_or_end(lambda: len(list(folder.glob("step-*/manifest.json"))) >= 2, "two checkpoints")


def _start_up(scene: Scene) -> bool:
    """The folder is held, and no rank is there: the plan is made, the folder laid out."""
    return scene.wait_or_end(lambda: _is_held(scene), "the folder to be held") and not scene.ranks()


def _is_held(scene: Scene) -> bool:
    """By this command: one that was killed has left its lock."""
    try:
        holder = Holder.load(scene.out / "run.lock")
    except (OSError, MeshwrightError):
        return False
    return scene.command is not None and holder.process.number == scene.command.pid


def _first_step(scene: Scene) -> bool:
    """Of this start of the ranks: it has just been done, and of a new run it is under way."""

    metrics = scene.out / "metrics.jsonl"

    def reached() -> bool:
        return scene.is_stepping() or (metrics.exists() and metrics.stat().st_size == 0)

    return scene.wait_or_end(reached, "the first step")


def _validation(scene: Scene) -> bool:
    """A loss is written down before the validation that follows it."""

    def validates() -> bool:
        lines = scene.lines() if scene.is_stepping() else []
        return bool(lines) and "loss" in lines[-1] and (lines[-1]["step"] + 1) % VALIDATE_EVERY == 0

    return scene.wait_or_end(validates, "a validation")


def _save(scene: Scene) -> bool:
    return scene.wait_or_end(lambda: list((scene.out / "checkpoints").glob(".*.draft")), "a save")


def _last_step(scene: Scene) -> bool:
    """Its loss is read at its end; the last but one's while it runs."""
    return scene.wait_or_end(lambda: scene.is_stepping() and scene.num_steps() >= STEPS - 2, "the last step")


def _end(scene: Scene) -> bool:
    """The last step is done; its checkpoint is on its way."""
    return scene.wait_or_end(lambda: scene.is_stepping() and scene.num_steps() >= STEPS, "the end")


START_UP = "start-up"
BOUNDARIES: dict[str, Callable[[Scene], bool]] = {
    START_UP: _start_up, "first step": _first_step, "validation": _validation, "save": _save, "last step": _last_step, "end": _end,
}  # fmt: skip
