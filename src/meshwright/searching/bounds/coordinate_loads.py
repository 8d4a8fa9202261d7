"""A lower bound on the busiest coordinate of a pipeline, for every cut.

Which units a coordinate runs is open; how many there are of each kind is not. The n units of the kind with most work are given to
coordinates. The first and the last unit lie where their stages do; all others count nothing. A coordinate with k units of that
kind takes

    t_c(k) = its wait for the first microbatch + its ends + k w + the recompute that makes k units fit   -> CoordinateLoads.seconds
             activations held: G_c microbatches of them (held_microbatches.py)

Every t_c grows with k, so the least T under which all units find a coordinate is found by bisection: Σ_c max {k: t_c(k) ≤ T} ≥ n
                                                                                         -> least_busiest
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from meshwright.searching.recompute_curve import cheapest_recompute
from meshwright.searching.unit_table import Row, UnitTable

RECOMPUTED = ("selective", "full")
FEW_ON_ONE, TIMES_EVEN = 4, 2
"""More units on a coordinate than these, and so many times an even share, are looked at only where it would take so many."""


@dataclass(frozen=True)
class HeldMicrobatches:
    """Microbatches that the activations of each coordinate amount to at least."""

    any_stages: Row
    """Whatever the sizes of its stages."""
    like_stages: Row | None = None
    """Where its stages are alike."""
    most: Row | None = None
    """The most of one stage: recompute of a block saves no more of them."""

    @property
    def ways(self) -> list[tuple[Row, Row]]:
        """Microbatches held, and how many of them a recompute saves: each is a lower bound on what must be recomputed."""
        found = [(self.any_stages, self.any_stages)]
        if self.like_stages is not None and self.most is not None:
            found.append((self.like_stages, self.most))
        return found


@dataclass(frozen=True)
class CoordinateLoads:
    table: UnitTable
    held: HeldMicrobatches
    homes: tuple[int, int] | None
    """The coordinates of the first and of the last unit; None where they are not known: then the ends count nothing."""
    state_bytes: Row
    """Of each unit."""
    working_bytes: Row
    """Bytes that each unit needs while it runs, in addition to what is kept."""
    budget_bytes: float
    waits: Row
    """Seconds before the first work of each coordinate, and behind its last."""

    def least_busiest(self, rows: Iterable[tuple[Row, int]]) -> float:
        """Seconds that some coordinate is busy or waits for its first microbatch, under every cut; infinite where no cut fits.

        rows: seconds of each unit in a step, counted in several ways, each with the number of microbatches whose recompute adds to
        them."""
        members = self.table.main_units
        ways = [(row, times) for row, times in rows if members and min(row[0], row[-1], row[members[0]]) >= 0]
        few = min(len(members), FEW_ON_ONE + TIMES_EVEN * len(members) // len(self.waits))
        again = self._recompute(members[0], few) if ways else np.zeros(0)
        return max((self._least_under(again, *way) for way in ways), default=0.0)

    def _least_under(self, again: Row, row: Row, times: int) -> float:
        """again: seconds of a microbatch's recompute of each coordinate (row) with 0 … units (column)."""
        members = self.table.main_units
        seconds, taken = _placed(self._seconds(again, row, times), len(members))
        if taken < again.shape[1] - 1 or taken == len(members):
            return seconds
        return _placed(self._seconds(self._recompute(members[0], len(members)), row, times), len(members))[0]

    def _seconds(self, again: Row, row: Row, times: int) -> Row:
        busy = self.waits[:, None] + row[self.table.main_units[0]] * np.arange(again.shape[1])[None, :]
        for home, end in zip(self.homes or (), (0, -1), strict=False):
            busy[home] += row[end]
        return np.asarray(busy + (times * again if times else np.where(np.isinf(again), inf, 0.0)))

    def _recompute(self, unit: int, count: int) -> Row:
        """Seconds of a microbatch's recompute that makes k units fit, by coordinate and k; infinite where none does."""
        table, units = self.table, np.arange(count + 1)[None, :]
        kept = {mode: float(table.kept[mode][unit + 1] - table.kept[mode][unit]) for mode in ("none", *RECOMPUTED)}
        fixed = self._fixed_bytes() + units * float(self.state_bytes[unit]) - self.budget_bytes
        plain = float(table.backward(unit, unit + 1))
        longer = {
            mode: units
            * max(0.0, float(table.backward(unit, unit + 1, mode)) - plain)
            * np.ones((len(self.held.any_stages), 1))
            for mode in RECOMPUTED
        }
        found = np.zeros(fixed.shape)
        for held, most in self.held.ways:
            over = fixed + held[:, None] * units * kept["none"]
            saved = {mode: most[:, None] * units * (kept["none"] - kept[mode]) for mode in RECOMPUTED}
            again = np.where(over <= 0, 0.0, cheapest_recompute(over, saved, longer))
            again[fixed + held[:, None] * units * kept["full"] > 0] = inf
            found = np.maximum(found, again)
        return found

    def _fixed_bytes(self) -> Row:
        """Of each coordinate, whatever its number of units: its ends, and the unit that runs."""
        count, ends = len(self.held.any_stages), list(zip(self.homes or (), (0, -1), strict=False))
        found = np.full(
            (count, 1), float(self.working_bytes[1:-1].min())
        )  # a stage without the ends ends with another unit
        if self.homes is None:
            found[[0, -1]] = self.working_bytes.min()
        for home, end in ends:
            found[home] = min(float(found[home, 0]), max(0.0, float(self.working_bytes[end])))
        for home, end in ends:
            kept = self.table.kept["none"]
            of_end = float(kept[1] - kept[0] if end == 0 else kept[-1] - kept[-2])
            found[home] += float(self.state_bytes[end]) + self.held.any_stages[home] * of_end
        return found


def _placed(times: Row, count: int) -> tuple[float, int]:
    """The least T under which coordinates take so many units, and the most that one of them takes."""
    candidates = np.unique(times[np.isfinite(times)])
    low, high = 0, len(candidates)
    taken = np.zeros(1)
    while low < high:
        middle = (low + high) // 2
        fitting = (times <= candidates[middle]).sum(axis=1) - 1
        if (fitting >= 0).all() and fitting.sum() >= count:
            high, taken = middle, fitting
        else:
            low = middle + 1
    return (float(candidates[low]), int(taken.max())) if low < len(candidates) else (inf, times.shape[1] - 1)
