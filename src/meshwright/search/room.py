"""How much room a point leaves, and the recompute that this forces on it: bounds, from the table of units alone.

A rank holds of every element of its parameters, by ZeRO stage, N ranks to a sharding group (the least; buffers left out):

    0   parameter + gradient + state
    1   (parameter + state) / N + gathered + gradient
    2   (parameter + state + gradient) / N + gathered
    3   (parameter + state + gradient) / N
        gradients where an earlier microbatch left some, or replicas keep buckets               -> _has_gradients
    and for the unit that runs its peak, its whole gradient (2, 3) and its gathered parameters, twice (3)   -> working_bytes

All p coordinates together have p · budget bytes. With S bytes of state and at least h microbatches in flight on each, they can
keep (p · budget - S) / h bytes of activations of one microbatch. What is more than that is recomputed, at no less than the
least seconds a byte of any unit                                                                -> recompute_seconds
The unit that runs saves nothing by recompute: what it did not keep is there again              -> Room.running_bytes
A cut must fit on every coordinate with everything recomputed                                   -> cut_fits
Where a coordinate has several stages, these are about even: the fullest coordinate must fit with everything recomputed
                                                                                                -> _even_fits
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from meshwright.core.cluster import Device
from meshwright.core.placement import coordinate_of
from meshwright.core.plan import placement_of
from meshwright.core.recipe import Recipe
from meshwright.cost.beside import usable_bytes
from meshwright.cost.state import Items
from meshwright.search.in_flight import in_flight
from meshwright.search.space import Point
from meshwright.search.units import Cut, least_size
from meshwright.search.work import Row, UnitTable


@dataclass(frozen=True)
class Room:
    """Bytes of a device, and of an element on it."""

    budget_bytes: float
    element_bytes: float
    expert_element_bytes: float
    working_element_bytes: float
    """Of the unit that runs, beside its share of the state."""

    def working_bytes(self, table: UnitTable) -> Row:
        """By unit, above what it keeps."""
        return table.least_peak + self._own_bytes(table)

    def running_bytes(self, table: UnitTable) -> Row:
        """By unit, above what it keeps when everything is recomputed."""
        return table.least_running + self._own_bytes(table)

    def _own_bytes(self, table: UnitTable) -> Row:
        return table.unit_elements * self.working_element_bytes

    def state_bytes(self, table: UnitTable) -> float:
        """Of all coordinates together."""
        return self.bytes_of(table, 0, table.num_units)

    def bytes_of(self, table: UnitTable, begin: int, end: int) -> float:
        """State of a row of units."""
        dense, expert = table.elements, table.expert_elements
        return float(
            (dense[end] - dense[begin]) * self.element_bytes + (expert[end] - expert[begin]) * self.expert_element_bytes
        )


def room_of(point: Point, items: Items, recipe: Recipe, budget_bytes: float, device: Device) -> Room:
    shape = point.shape
    budget = usable_bytes(budget_bytes, shape.mesh, shape.compile, device)
    degree = 1 if point.zero == 0 else point.hybrid or shape.dp * shape.cp
    few = max(1, min(degree, shape.dp * shape.cp // shape.ep))
    dense, expert = (_element_bytes(point, items, recipe, ranks) for ranks in (degree, few))
    return Room(budget, dense, expert, _working(point, items, recipe))


def _working(point: Point, items: Items, recipe: Recipe) -> float:
    if recipe.master_item_bytes or point.zero < 2 or point.offload == "parameters" or _leaves_early(point):
        return 0.0
    return items.gradient + (2 * items.gathered if point.zero == 3 else 0)


def _element_bytes(point: Point, items: Items, recipe: Recipe, degree: int) -> float:
    if point.offload == "parameters":
        return 0.0
    if _leaves_early(point):  # stored in what the device computes with; gradients leave as they are made
        return min(items.parameter, items.gathered) / degree
    state = 0.0 if point.offload == "optimizer" else items.state / degree
    gradient = items.gradient / (degree if point.zero >= 2 else 1) if _has_gradients(point) else 0.0
    packs = point.zero in (1, 2) and not recipe.master_item_bytes
    return items.parameter / degree + state + gradient + (items.gathered if packs else 0)


def _leaves_early(point: Point) -> bool:
    return point.offload == "optimizer" and point.shape.mesh.world == 1


def _has_gradients(point: Point) -> bool:
    """Whether gradients are there when activations are fullest: those of the microbatches before, or replicas' buckets.

    A pipeline that is no more than filled is fullest before the first backward, as GPipe always is."""
    shape = point.shape
    filling = 2 * shape.pp - 1 if point.schedule == "interleaved" else shape.pp
    has_earlier = point.schedule != "gpipe" and shape.num_microbatches > filling
    return has_earlier or (point.zero == 0 and shape.dp * shape.cp > 1)


def recompute_seconds(table: UnitTable, point: Point, room: Room) -> float:
    """Seconds a microbatch spends at least on recompute, over all stages; infinite where nothing makes it fit."""
    shape = point.shape
    held = in_flight(point.schedule, shape.pp, shape.num_microbatches, point.virtual)
    others = max(0.0, min(held) / point.virtual - 1)  # beside the microbatch at hand
    each = room.budget_bytes - float(room.working_bytes(table).min())
    left = (shape.pp * each - room.state_bytes(table)) / (others + 1)
    wanted = float(table.kept["none"][-1]) - left
    if left < 0 or not _all_fits(table, point, room, others):
        return inf
    if point.virtual > 1 and not _even_fits(table, point, room, max(held)):
        return inf
    if wanted <= 0:
        return 0.0
    return wanted * table.seconds_per_saved_byte


def _all_fits(table: UnitTable, point: Point, room: Room, others: float) -> bool:
    """Whether all coordinates together have room with everything recomputed."""
    each = room.budget_bytes - float(room.running_bytes(table).min())
    kept = (others + 1) * float(table.kept["full"][-1])
    return point.shape.pp * each >= room.state_bytes(table) + kept


def least_bytes(table: UnitTable, point: Point, room: Room) -> float:
    """What a device needs at least, with everything recomputed and stages as even as can be."""
    state = room.state_bytes(table) / point.shape.pp
    held = max(in_flight(point.schedule, point.shape.pp, point.shape.num_microbatches, point.virtual))
    kept = held * float(table.kept["full"][-1]) / point.num_stages
    return state + kept + float(room.running_bytes(table).min())


def cut_fits(table: UnitTable, point: Point, room: Room, cut: Cut) -> bool:
    """Whether every coordinate may fit with everything recomputed: its state, what its microbatches keep, and the unit that runs,
    the last one beside all that is kept, any other beside what the other microbatches keep."""
    shape = point.shape
    held = in_flight(point.schedule, shape.pp, shape.num_microbatches, point.virtual)
    running, kept = room.running_bytes(table), table.unit_kept
    state = np.zeros(shape.pp)
    least = np.full(shape.pp, np.inf)
    largest = np.zeros(shape.pp)
    for stage, (begin, end) in enumerate(pairwise((0, *cut))):
        home = coordinate_of(stage, shape.pp, placement_of(point.schedule))
        state[home] += room.bytes_of(table, begin, end)
        whole = float(table.kept_by(begin, end, "full"))
        least[home] = min(least[home], whole)
        alone = float((running[begin:end] + kept[begin:end]).max())
        largest[home] = max(largest[home], alone, whole + running[end - 1])
    return bool(np.all(state + (np.array(held) - 1) * least + largest <= room.budget_bytes))


def _even_fits(table: UnitTable, point: Point, room: Room, held: int) -> bool:
    size = least_size(table.num_units, point.num_stages)
    elements = np.diff(table.elements) * room.element_bytes + np.diff(table.expert_elements) * room.expert_element_bytes
    state = point.virtual * size * float(elements.min())
    kept = held * size * float(np.diff(table.kept["full"]).min())
    return state + kept + float(room.running_bytes(table).min()) <= room.budget_bytes
