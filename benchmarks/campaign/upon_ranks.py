"""Faults upon ranks, which the run survives by itself: it goes on from its last checkpoint."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress

from injection import alive, inject

from campaign.fault import MISSED, Kind, Outcome, Put
from campaign.moments import at_random
from campaign.scene import Scene


def upon_rank(kind: str) -> Kind:
    """One of the kinds of `injection.py`, upon a random rank."""

    def put(scene: Scene, chance: random.Random) -> Put:
        if not at_random(scene, chance):
            return MISSED
        return Put(Outcome.RECOVERED) if lose_rank(kind, scene, chance) else MISSED

    return put


def lose_rank(kind: str, scene: Scene, chance: random.Random) -> bool:
    """Until every rank of that start is gone; False where there was nothing to break."""
    ranks = scene.ranks()
    if not ranks or not inject(kind, chance.choice(sorted(ranks)), ranks):
        return False
    scene.wait_or_end(lambda: not any(alive(process) for process in ranks.values()), f"ranks to be gone after {kind}")
    return True


def lose_template(scene: Scene, chance: random.Random) -> Put:
    """The process that ranks are forked from, killed or stopped; then a rank, so that it is missed."""
    if not at_random(scene, chance):
        return MISSED
    template = scene.template()
    if template is None:
        return MISSED
    with suppress(ProcessLookupError):
        os.kill(template, signal.SIGKILL)
    return Put(Outcome.RECOVERED) if lose_rank("kill", scene, chance) else MISSED
