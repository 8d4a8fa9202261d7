"""The least recompute (activation checkpointing) that makes a plan with a given cut fit, for each pp coordinate.

Recompute on one coordinate makes only its own stages longer, so each coordinate recomputes as little as it must. The first n_full
of its repeated blocks are recomputed in full, the next n_selective selectively. The table of units says what each pair
(n_full, n_selective) saves; the fastest pair that saves enough is taken                        -> _Coordinates.quickest
Then an estimate of memory checks the choice. Bytes over the budget are added to what must be saved, and this is repeated up to
MOST_TRIES times. In the end blocks that need no recompute are taken back                       -> fitted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan, Recompute
from meshwright.cost.estimate import Estimator
from meshwright.cost.microbatch import Microbatch
from meshwright.rules.kinds import cached_in_value
from meshwright.rules.plain_plan import recompute_rules
from meshwright.searching.plan_builder import rules_of
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point
from meshwright.searching.unit_table import UnitTable
from meshwright.searching.units import Cut

MOST_TRIES = 6
"""Estimates of memory for one cut."""


@dataclass(frozen=True)
class Again:
    """How many repeated blocks of a coordinate are recomputed in full, and selectively."""

    full: int = 0
    selective: int = 0


def fitted(
    problem: Problem,
    point: Point,
    cut: Cut,
    plan: Plan,
    table: UnitTable,
    microbatch: Microbatch,
    *,
    must_fit: bool = False,
) -> tuple[Plan, Estimate] | None:
    """The plan with its recompute, and its estimate. Where no recompute makes it fit: None if it must fit, else the plan with full
    recompute."""
    if problem.request.recompute is not None:
        rules = recompute_rules(problem.request.recompute, problem.graph.repeated_blocks)
        return _as_asked(problem, msgspec.structs.replace(plan, recompute=rules), microbatch, must_fit)
    coordinates = _Coordinates(problem, point, cut, plan, table, microbatch)
    chosen = [Again()] * point.shape.pp
    found = coordinates.estimator(chosen)
    over = [needed - coordinates.budget for needed in found.needed_bytes()]
    if max(over) <= 0 or not problem.graph.repeated_blocks:
        return found.plan, found.estimate(problem.budget_bytes)
    if must_fit and max(coordinates.least_bytes()) > coordinates.budget:
        return None
    wanted = [float(max(0, bytes_over)) for bytes_over in over]
    best: Estimator | None = None
    for _ in range(MOST_TRIES):
        chosen = [coordinates.quickest(place, size) for place, size in enumerate(wanted)]
        found = coordinates.estimator(chosen)
        over = [needed - coordinates.budget for needed in found.needed_bytes()]
        if max(over) <= 0:
            best = found
            break
        stuck = all(
            bytes_over <= 0 or coordinates.is_all(place, chosen[place]) for place, bytes_over in enumerate(over)
        )
        if stuck:
            break
        wanted = [size + max(0, bytes_over) for size, bytes_over in zip(wanted, over, strict=True)]
    if best is None:
        return None if must_fit else (found.plan, found.estimate(problem.budget_bytes))
    best = coordinates.with_less(chosen, best)
    return best.plan, best.estimate(problem.budget_bytes)


def _as_asked(problem: Problem, plan: Plan, microbatch: Microbatch, must_fit: bool) -> tuple[Plan, Estimate] | None:
    found = Estimator(problem.graph_of(plan), plan, problem.cluster, problem.recipe, microbatch=microbatch)
    if must_fit and max(found.needed_bytes()) > problem.budget:
        return None
    return plan, found.estimate(problem.budget_bytes)


class _Coordinates:
    """What recompute saves and costs on each coordinate of one cut."""

    def __init__(
        self, problem: Problem, point: Point, cut: Cut, plan: Plan, table: UnitTable, microbatch: Microbatch
    ) -> None:
        self.problem, self.point, self.plan, self.table, self.microbatch = problem, point, plan, table, microbatch
        self.budget = problem.budget
        self._first: Estimator | None = None
        self.held = point.in_flight
        self.rows: list[list[tuple[int, int]]] = [[] for _ in self.held]
        self.blocks: list[list[str]] = [[] for _ in self.held]
        repeated = set(problem.graph.repeated_blocks)
        for home, row, blocks in zip(point.homes, pairwise((0, *cut)), plan.blocks_by_stage, strict=True):
            self.rows[home].append(row)
            self.blocks[home] += [name for name in blocks if name in repeated]

    def estimator(self, chosen: Sequence[Again]) -> Estimator:
        return self._estimator(tuple(chosen))

    @cached_in_value
    def _estimator(self, chosen: tuple[Again, ...]) -> Estimator:
        problem = self.problem
        plan = msgspec.structs.replace(self.plan, recompute=self._rules(chosen))
        found = Estimator(problem.graph_of(plan), plan, problem.cluster, problem.recipe, self._first, self.microbatch)
        self._first = self._first or found
        return found

    def _rules(self, chosen: Sequence[Again]) -> tuple[Recompute, ...]:
        full, selective = set[str](), set[str]()
        for again, names in zip(chosen, self.blocks, strict=True):
            full |= set(names[: again.full])
            selective |= set(names[again.full : again.full + again.selective])
        return rules_of(self.plan.blocks, {"full": full, "selective": selective})

    def least_bytes(self) -> list[int]:
        """Bytes each coordinate needs with full recompute."""
        return self.estimator([Again(full=len(names)) for names in self.blocks]).needed_bytes()

    def is_all(self, place: int, again: Again) -> bool:
        return again.full == len(self.blocks[place])

    def quickest(self, place: int, wanted: float) -> Again:
        """The fastest pair that saves the wanted bytes; full recompute of all blocks where no pair saves enough."""
        count = len(self.blocks[place])
        if wanted <= 0 or not count:
            return Again()
        selective, full = (self._saved(place, mode) / count for mode in ("selective", "full"))
        longer = {mode: self._longer(place, mode) / count for mode in ("selective", "full")}
        best, best_seconds = Again(full=count), count * longer["full"]
        for num_full in range(count + 1):
            left = wanted - num_full * full
            num_selective = 0 if left <= 0 else _ceil(left, selective)
            if num_full + num_selective > count:
                continue
            seconds = num_full * longer["full"] + num_selective * longer["selective"]
            if seconds < best_seconds:
                best, best_seconds = Again(num_full, num_selective), seconds
        return best

    def _saved(self, place: int, mode: str) -> float:
        """Bytes saved at the peak if all blocks are recomputed. Compiled blocks are recomputed in full or not at all."""
        if mode == "selective" and self.plan.compile:
            return 0.0
        rows = self.rows[place]
        kept = (self.table.kept_by(b, e, "none") - self.table.kept_by(b, e, mode) for b, e in rows)
        return float(sum(kept)) * self.held[place] / self.point.virtual

    def _longer(self, place: int, mode: str) -> float:
        rows = self.rows[place]
        return float(sum(self.table.backward(b, e, mode) - self.table.backward(b, e) for b, e in rows))

    def with_less(self, chosen: list[Again], best: Estimator) -> Estimator:
        """Takes back the recompute of one block on every coordinate that then still fits, up to MOST_TRIES times."""
        for _ in range(MOST_TRIES):
            fewer = [_fewer(again) for again in chosen]
            needed = self.estimator(fewer).needed_bytes()
            kept = [
                less if size <= self.budget else again for less, again, size in zip(fewer, chosen, needed, strict=True)
            ]
            if kept == chosen:
                return best
            chosen, best = kept, self.estimator(kept)
        return best


def _fewer(again: Again) -> Again:
    if again.selective:
        return Again(again.full, again.selective - 1)
    return Again(max(0, again.full - 1), 0)


def _ceil(wanted: float, each: float) -> int:
    return int(-(-wanted // each)) if each > 0 else 10**9
