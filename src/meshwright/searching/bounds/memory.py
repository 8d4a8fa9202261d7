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
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from meshwright.core.pipeline.kinds import ScheduleKind, kind_of
from meshwright.core.plan import ZeroStage
from meshwright.core.recipe import Recipe
from meshwright.cost.memory.allocator_slack import usable_bytes
from meshwright.cost.memory.local_parameters import Items
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape
from meshwright.searching.unit_table import Beside, BlockBytes, Places, Row, UnitTable
from meshwright.searching.units import Cut


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

    @property
    def working(self) -> Beside:
        """Bytes that units need while they run, in addition to what they keep."""
        return self.table.beside(self.of_block, recomputed=False)

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

    @cached_property
    def recompute_seconds(self) -> float:
        """Seconds a microbatch spends at least on recompute, over all stages; infinite where nothing makes it fit."""
        left = self._left_bytes()
        return inf if left is None else self.table.least_recompute_seconds(self.table.all_kept["none"] - left)

    def _left_bytes(self) -> float | None:
        """What all coordinates together can keep of a microbatch; None where nothing makes it fit."""
        virtual = self.point.virtual
        held: tuple[float, ...] = self.point.in_flight
        if virtual > 1:
            held = (max(1.0, min(held) / virtual),) * len(held)
        kept = self._kept_bytes(self.working, held)
        recomputed = self._kept_bytes(self.running, held)
        if kept is None or recomputed is None or recomputed < self.table.all_kept["full"]:
            return None
        return kept if virtual == 1 or self._several_fit() else None

    def _kept_bytes(self, beside: Beside, held: tuple[float, ...]) -> float | None:
        """Bytes of one microbatch that all coordinates together have room for; None where there is none for their state. held:
        microbatches in flight on each."""
        p = len(held)
        free = self.budget_bytes - beside.least_of(p)
        state = self.state_bytes + (beside.on_all(p) - p * beside.least_of(p))
        if free <= 0 or state > p * free:
            return None
        filled = np.clip(state - free * np.arange(p), 0.0, free)
        return float(((free - filled) / np.sort(held)[::-1]).sum())

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
        """Whether every coordinate may fit with everything recomputed: its state, what its microbatches keep, and the unit that
        runs, the last one beside all that is kept, any other beside what the other microbatches keep."""
        pp, running = self.point.shape.pp, self.running.by_unit
        alone_bytes = running + self.table.unit_kept
        state, least, largest = np.zeros(pp), np.full(pp, np.inf), np.zeros(pp)
        for home, (begin, end) in zip(self.point.homes, pairwise((0, *cut)), strict=True):
            state[home] += self.bytes_of(begin, end)
            whole = float(self.table.kept_by(begin, end, "full"))
            least[home] = min(least[home], whole)
            alone = float(alone_bytes[begin:end].max())
            largest[home] = max(largest[home], alone, whole + running[end - 1])
        return bool(np.all(state + (np.array(self.point.in_flight) - 1) * least + largest <= self.budget_bytes))


def room_of(problem: Problem, point: Point, table: UnitTable, items: Items, *, gradients: bool) -> Room:
    """gradients: whether they are there when activations are fullest."""
    shape, recipe = point.shape, problem.recipe
    budget = usable_bytes(problem.budget, shape.mesh, shape.compile, problem.cluster.device)
    degree = point.sharding_ranks
    few = max(1, min(degree, shape.replicas // shape.ep))
    dense, expert = (_element_bytes(point, items, recipe, ranks, gradients) for ranks in (degree, few))
    return Room(point, table, budget, dense, expert, _of_block(point, items, recipe, gradients))


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
