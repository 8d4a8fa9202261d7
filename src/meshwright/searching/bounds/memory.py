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
recomputed                                                                                      -> recompute_seconds
Recompute saves nothing on the unit that runs: what it did not keep is computed again           -> Room.running
A cut must fit on every coordinate with everything recomputed                                   -> cut_fits
Where a coordinate has several stages, each has a unit at least, and the fullest must fit       -> _several_fit
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from meshwright.core.cluster import Device
from meshwright.core.pipeline.kinds import ScheduleKind, kind_of
from meshwright.core.plan import ZeroStage
from meshwright.core.recipe import Recipe
from meshwright.cost.memory.allocator_slack import usable_bytes
from meshwright.cost.memory.local_parameters import Items
from meshwright.searching.space import Point, Shape
from meshwright.searching.unit_table import Beside, BlockBytes, Places, Row, UnitTable
from meshwright.searching.units import Cut


@dataclass(frozen=True)
class Room:
    """The budget of a device, and the bytes that an element of parameters takes on it."""

    budget_bytes: float
    element_bytes: float
    expert_element_bytes: float
    of_block: BlockBytes
    """Bytes of an element of the block that runs, in addition to its share of the state."""

    def working(self, table: UnitTable) -> Beside:
        """Bytes that units need while they run, in addition to what they keep."""
        return table.beside(self.of_block, recomputed=False)

    def running(self, table: UnitTable) -> Beside:
        """The same, where everything is recomputed."""
        return table.beside(self.of_block, recomputed=True)

    def state_bytes(self, table: UnitTable) -> float:
        """State of all coordinates together."""
        return float(self.bytes_of(table, 0, table.num_units))

    def bytes_of(self, table: UnitTable, begin: Places | int, end: Places | int) -> Row:
        """State of a row of units."""
        dense, expert = (row[end] - row[begin] for row in (table.elements, table.expert_elements))
        return np.asarray(dense * self.element_bytes + expert * self.expert_element_bytes)


def room_of(
    point: Point, items: Items, recipe: Recipe, budget_bytes: float, device: Device, *, gradients: bool
) -> Room:
    """gradients: whether they are there when activations are fullest."""
    shape = point.shape
    budget = usable_bytes(budget_bytes, shape.mesh, shape.compile, device)
    degree = point.sharding_ranks
    few = max(1, min(degree, shape.replicas // shape.ep))
    dense, expert = (_element_bytes(point, items, recipe, ranks, gradients) for ranks in (degree, few))
    return Room(budget, dense, expert, _of_block(point, items, recipe, gradients))


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


def recompute_seconds(table: UnitTable, point: Point, room: Room) -> float:
    """Seconds a microbatch spends at least on recompute, over all stages; infinite where nothing makes it fit."""
    left = _left_bytes(table, point, room)
    if left is None:
        return inf
    return table.least_recompute_seconds(table.all_kept["none"] - left)


def _left_bytes(table: UnitTable, point: Point, room: Room) -> float | None:
    """What all coordinates together can keep of a microbatch; None where nothing makes it fit."""
    shape = point.shape
    held: tuple[float, ...] = point.in_flight
    most = max(held)
    state = room.state_bytes(table)
    if point.virtual > 1:
        held = (max(1.0, min(held) / point.virtual),) * shape.pp
    kept = _kept_bytes(room, state, room.working(table), held)
    if kept is None:
        return None
    recomputed = _kept_bytes(room, state, room.running(table), held)
    if recomputed is None or recomputed < table.all_kept["full"]:
        return None
    if point.virtual > 1 and not _several_fit(table, point, room, most):
        return None
    return kept


def _kept_bytes(room: Room, state: float, beside: Beside, held: tuple[float, ...]) -> float | None:
    """Bytes of one microbatch that all coordinates together have room for; None where there is none for their state. held:
    microbatches in flight on each."""
    p = len(held)
    free = room.budget_bytes - beside.least_of(p)
    state += beside.on_all(p) - p * beside.least_of(p)
    if free <= 0 or state > p * free:
        return None
    filled = np.clip(state - free * np.arange(p), 0.0, free)
    return float(((free - filled) / np.sort(held)[::-1]).sum())


def least_bytes(table: UnitTable, point: Point, room: Room) -> float:
    """What a device needs at least, with everything recomputed and stages as even as can be."""
    state = room.state_bytes(table) / point.shape.pp
    kept = max(point.in_flight) * table.all_kept["full"] / point.num_stages
    return state + kept + room.running(table).least


def cut_fits(table: UnitTable, point: Point, room: Room, cut: Cut) -> bool:
    """Whether every coordinate may fit with everything recomputed: its state, what its microbatches keep, and the unit that runs,
    the last one beside all that is kept, any other beside what the other microbatches keep."""
    shape = point.shape
    running = room.running(table).by_unit
    alone_bytes = running + table.unit_kept
    state = np.zeros(shape.pp)
    least = np.full(shape.pp, np.inf)
    largest = np.zeros(shape.pp)
    for home, (begin, end) in zip(point.homes, pairwise((0, *cut)), strict=True):
        state[home] += room.bytes_of(table, begin, end)
        whole = float(table.kept_by(begin, end, "full"))
        least[home] = min(least[home], whole)
        alone = float(alone_bytes[begin:end].max())
        largest[home] = max(largest[home], alone, whole + running[end - 1])
    return bool(np.all(state + (np.array(point.in_flight) - 1) * least + largest <= room.budget_bytes))


def _several_fit(table: UnitTable, point: Point, room: Room, held: float) -> bool:
    """Each of its stages has a unit of its own."""
    states = np.sort(room.bytes_of(table, *table.alone))
    state = float(states[: point.virtual].sum())
    kept = held * float(table.unit_kept.min())
    return state + kept + room.running(table).least <= room.budget_bytes
