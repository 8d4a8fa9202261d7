"""Bounds on memory, from the table of units alone: the bytes that a point leaves free, and the recompute that makes it fit.

A rank holds of every element of its parameters, by ZeRO stage, N ranks to a sharding group (the least; buffers left out):

    0   parameter + gradient + state
    1   (parameter + state) / N + gathered + gradient
    2   (parameter + state + gradient) / N + gathered
    3   (parameter + state + gradient) / N
        gradients where an earlier microbatch left some, or replicas keep buckets               -> has_gradients
    and for the unit that runs its peak beside its gathered parameters, or these twice (3)                  -> UnitTable.beside

Coordinate i has the budget and h_i microbatches in flight. What its state leaves is shared by these: 1 / h_i for each. State takes
the smallest share where most microbatches are in flight. Activations of one microbatch that find no room on any coordinate are
recomputed                                                                                      -> Room.recompute_seconds
Recompute saves nothing on the unit that runs: what it did not keep is computed again           -> Room.running
A cut must fit on every coordinate with everything recomputed                                   -> Room.cut_fits
Where a coordinate has several stages, each has a unit at least, and the fullest must fit       -> Room._several_fit
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.core.pipeline.kinds import ScheduleKind, kind_of
from meshwright.core.plan import ZeroStage
from meshwright.core.recipe import Recipe
from meshwright.cost.memory.allocator_slack import usable_bytes
from meshwright.cost.memory.local_parameters import Items
from meshwright.searching.bounds.coordinate_loads import HeldMicrobatches
from meshwright.searching.bounds.held_microbatches import (
    held_by_like_stages,
    held_microbatches,
    most_held,
)
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape, has_many_cuts
from meshwright.searching.unit_table import Beside, BlockBytes, Places, Row, UnitTable
from meshwright.searching.units import Cut

LEAST_HELD = 1e-6
"""Where nothing is known of the microbatches that a coordinate holds, it has room for nearly any number."""
MOSTLY = 0.9
"""The share of the blocks that are of one kind in a model whose stages are of like size."""


@dataclass(frozen=True)
class Room:
    """The memory of a point: the budget of a device, and the bytes that an element of parameters takes on it."""

    point: Point
    table: UnitTable
    budget_bytes: float
    element_bytes: float
    expert_element_bytes: float
    of_block: BlockBytes
    """Bytes of an element of the block that runs, in addition to its share of the state."""
    like_stages: bool = False
    """Whether all stages but the first and the last have the same number of units, or one more."""

    @property
    def working(self) -> Beside:
        """Bytes that units need while they run, in addition to what they keep."""
        return self.table.beside(self.of_block, recomputed=False)

    @property
    def inside(self) -> Row:
        """The same of stages with two units or more, by their last unit."""
        return np.asarray(np.maximum(self.working.by_unit, self.table.inside(self.of_block)))

    @property
    def between_ends(self) -> Row:
        """Bytes that stages need in addition to what they keep, by their last unit, where the first and the last stage are not
        looked at: the others begin behind the first unit."""
        if not (self.like_stages and self.table.num_units - 2 >= 2 * self.point.num_stages):
            return self.working.by_unit
        found = self.inside.copy()
        found[1] = np.inf  # a stage of two units ends no earlier than with the third
        found[[0, -1]] = self.working.by_unit[[0, -1]]
        return found

    @property
    def running(self) -> Beside:
        """The same, where everything is recomputed."""
        return self.table.beside(self.of_block, recomputed=True)

    @property
    def state_bytes(self) -> float:
        """State of all coordinates together."""
        return float(self.bytes_of(0, self.table.num_units))

    def bytes_of(self, begin: Places | int, end: Places | int) -> Row:
        """State of a row of units."""
        dense, expert = (row[end] - row[begin] for row in (self.table.elements, self.table.expert_elements))
        return np.asarray(dense * self.element_bytes + expert * self.expert_element_bytes)

    def held_by_coordinate(self, mode: str = "none") -> HeldMicrobatches:
        """mode: how blocks are recomputed that keep these."""
        return held_of(self.table, self.point, mode, like_stages=self.like_stages)

    @cached_property
    def recompute_seconds(self) -> float:
        """Seconds a microbatch spends at least on recompute, over all stages; infinite where nothing makes it fit."""
        left = self._left_bytes()
        return inf if left is None else self.table.least_recompute_seconds(self.table.all_kept["none"] - left)

    def _left_bytes(self) -> float | None:
        """What all coordinates together can keep of a microbatch; None where nothing makes it fit."""
        kept = self._kept_bytes(self.working, self.held_by_coordinate().any_stages)
        recomputed = self._kept_bytes(self.running, self.held_by_coordinate("full").ways[-1][0])
        if kept is None or recomputed is None or recomputed < self.table.all_kept["full"]:
            return None
        return kept if self.point.virtual == 1 or self._several_fit() else None

    def _kept_bytes(self, beside: Beside, held: Row) -> float | None:
        """Bytes of one microbatch that all coordinates together have room for; None where there is none for their state. held:
        microbatches in flight on each."""
        p = len(held)
        free = self.budget_bytes - beside.least_of(p)
        state = self.state_bytes + (beside.on_all(p) - p * beside.least_of(p))
        if free <= 0 or state > p * free:
            return None
        filled = np.clip(state - free * np.arange(p), 0.0, free)
        return float(((free - filled) / np.maximum(np.sort(held)[::-1], LEAST_HELD)).sum())

    def _several_fit(self) -> bool:
        """Whether the fullest coordinate may fit, where each of its stages has a unit of its own."""
        states = np.sort(self.bytes_of(*self.table.alone))
        state = float(states[: self.point.virtual].sum())
        kept = max(self.point.in_flight) * float(self.table.unit_kept.min())
        return state + kept + self.running.least <= self.budget_bytes

    @property
    def least_bytes(self) -> float:
        """What a device needs at least, with everything recomputed and stages as even as can be."""
        state = self.state_bytes / self.point.shape.pp
        kept = max(self.point.in_flight) * self.table.all_kept["full"] / self.point.num_stages
        return state + kept + self.running.least

    def cut_fits(self, cut: Cut) -> bool:
        return bool(self.cuts_fit(np.array([cut], dtype=np.int64))[0])

    def cuts_fit(self, cuts: Places) -> NDArray[np.bool_]:
        """For each cut, a row of ends of stages, whether every coordinate may fit with everything recomputed: its state, what its
        microbatches keep, and the unit that runs, the last one beside all that is kept, any other beside what the other
        microbatches keep."""
        shape = len(cuts), self.point.shape.pp
        running = self.running.by_unit
        alone_bytes = running + self.table.unit_kept
        state, least, largest = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
        begins = np.zeros(len(cuts), dtype=np.int64)
        for stage, home in enumerate(self.point.homes):
            ends = cuts[:, stage]
            state[:, home] += self.bytes_of(begins, ends)
            whole = self.table.kept_by(begins, ends, "full")
            least[:, home] = np.minimum(least[:, home], whole)
            alone = np.maximum(_largest_between(alone_bytes, begins, ends), whole + running[ends - 1])
            largest[:, home] = np.maximum(largest[:, home], alone)
            begins = ends
        needed = state + (np.array(self.point.in_flight) - 1) * least + largest
        return np.asarray(np.all(needed <= self.budget_bytes, axis=1))


def _largest_between(values: Row, begins: Places, ends: Places) -> Row:
    """The largest value of each row of units; every row has one at least."""
    places = np.ravel(np.column_stack([begins, ends]))
    return np.asarray(np.maximum.reduceat(np.append(values, -np.inf), places)[::2])


def room_of(problem: Problem, point: Point, table: UnitTable, items: Items, *, gradients: bool) -> Room:
    """gradients: whether they are there when activations are fullest."""
    shape, recipe = point.shape, problem.recipe
    budget = usable_bytes(problem.budget, shape.mesh, shape.compile, problem.cluster.device)
    degree = point.sharding_ranks
    few = max(1, min(degree, shape.replicas // shape.ep))
    dense, expert = (_element_bytes(point, items, recipe, ranks, gradients) for ranks in (degree, few))
    of_block = _of_block(point, items, recipe, gradients)
    return Room(point, table, budget, dense, expert, of_block, has_like_stages(problem, table))


def held_of(table: UnitTable, point: Point, mode: str, *, like_stages: bool) -> HeldMicrobatches:
    """What the coordinates of a point hold. like_stages: as in Room. mode: how blocks are recomputed that keep these."""
    about = point.schedule, point.shape.pp, point.shape.num_microbatches, point.virtual
    if not like_stages or point.virtual == 1:
        return _held(*about)
    size = max(1, (table.num_units - 2) // point.num_stages)
    return _held(*about, round(size / (size + 1) * table.likeness(mode), 2))


@lru_cache(maxsize=65536)
def _held(name: ScheduleKind, p: int, m: int, v: int, ratio: float | None = None) -> HeldMicrobatches:
    any_stages = np.array(held_microbatches(name, p, m, v))
    if ratio is None:
        return HeldMicrobatches(any_stages)
    like = held_by_like_stages(name, p, m, v, ratio)
    return HeldMicrobatches(any_stages, np.array(like), np.array(most_held(name, p, m, v)))


def has_like_stages(problem: Problem, table: UnitTable) -> bool:
    """Whether pipelines with several stages a coordinate are searched with stages of like size alone (cuts/best_cut.py)."""
    return has_many_cuts(problem) and len(table.main_units) >= MOSTLY * (table.num_units - 2)


def _of_block(point: Point, items: Items, recipe: Recipe, gradients: bool) -> BlockBytes:
    """gradients: whether sums of earlier microbatches are part of the state."""
    if not recipe.system.packs or point.zero == 0 or point.offload == "parameters" or _leaves_early(point):
        return BlockBytes()
    if point.zero == 1:  # reduced behind the last microbatch, where all gradients are part of the state
        return BlockBytes(reduced=items.reduced if gradients or point.shape.num_microbatches == 1 else 0.0)
    return BlockBytes(items.gathered if point.zero == 3 else 0.0, items.gradient, items.reduced)


def _element_bytes(point: Point, items: Items, recipe: Recipe, degree: int, gradients: bool) -> float:
    if point.offload == "parameters":
        return 0.0
    if _leaves_early(point):  # stored in what the device computes with; gradients leave as they are made
        return min(items.parameter, items.gathered) / degree
    state = 0.0 if point.offload == "optimizer" else items.state / degree
    gradient = items.gradient / (degree if point.zero >= 2 else 1) if gradients else 0.0
    packs = point.zero in (1, 2) and recipe.system.packs
    return items.parameter / degree + state + gradient + (items.gathered if packs else 0)


def _leaves_early(point: Point) -> bool:
    return point.offload == "optimizer" and point.shape.mesh.world == 1


def has_gradients(shape: Shape, zero: ZeroStage, schedule: ScheduleKind) -> bool:
    """Whether gradients are there when activations are fullest: those of the microbatches before, or buckets of replicas, which
    stages give up.

    A pipeline that is no more than filled is fullest before the first backward, as GPipe always is."""
    kind = kind_of(schedule)
    has_earlier = not kind.keeps_all and shape.num_microbatches > kind.filling(shape.pp)
    return has_earlier or (zero == 0 and shape.replicas > 1 and shape.pp == 1)
