"""The kinds of fault by name, what keeps one from being made here, and which of them a plan gets in which order."""

from __future__ import annotations

import random
from collections.abc import Iterable

from injection import why_not as rank_fault_missing

from campaign.damage import damage
from campaign.fault import Kind
from campaign.plans import PlanKind
from campaign.upon_folder import fill_disk, make_read_only, remove_folder, remove_part, rename_folder, start_second
from campaign.upon_launcher import kill_launcher, stop_rank_and_kill_launcher, tell_to_stop
from campaign.upon_ranks import lose_template, upon_rank

KINDS: dict[str, Kind] = {
    **{kind: upon_rank(kind) for kind in ("kill", "stop", "raise", "cut")},
    "template": lose_template, "launcher": kill_launcher, "stop+kill": stop_rank_and_kill_launcher, "signal": tell_to_stop,
    "full": fill_disk, "read-only": make_read_only, "renamed": rename_folder, "removed": remove_folder, "part": remove_part,
    "two": start_second, "damage": damage,
}  # fmt: skip
NEED_MOUNTS = ("full", "read-only")
SCATTERING = ("renamed", "removed")
"""After these a run gets no further fault."""
UPON_FEWER = ("kill", "stop", "raise", "cut", "template", "launcher", "signal")
"""With fewer ranks after a fault; the others have nothing to do with ranks."""
TWICE = ("signal", "damage")
"""Of many ways each."""


def why_not(kind: str, no_mounts: str) -> str:
    """What keeps a kind from being made here; empty where nothing does."""
    if kind in NEED_MOUNTS:
        return no_mounts
    return rank_fault_missing(kind)


class Deck:
    """Every kind once, those of many ways twice, in a random order; then again."""

    def __init__(self, plan: PlanKind, kinds: Iterable[str], chance: random.Random) -> None:
        of_plan = [kind for kind in kinds if not plan.fewer or kind in UPON_FEWER]
        self._kinds = [*of_plan, *(kind for kind in of_plan if kind in TWICE)]
        self._chance = chance
        self._left: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self._kinds

    def deal(self, count: int) -> list[str]:
        """For one run: up to one that scatters its folder."""
        dealt: list[str] = []
        while len(dealt) < count and not (dealt and dealt[-1] in SCATTERING):
            if not self._left:
                self._left = self._chance.sample(self._kinds, len(self._kinds))
            dealt.append(self._left.pop())
        return dealt

    def take_back(self, kinds: Iterable[str]) -> None:
        """Those that came too late."""
        self._left = [*kinds, *self._left]
