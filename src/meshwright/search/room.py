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
Where a coordinate has several stages, these are about even: the fullest coordinate must fit with everything recomputed
                                                                                                -> _even_fits
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from meshwright.core.cluster import Device
from meshwright.core.recipe import Recipe
from meshwright.cost.beside import usable_bytes
from meshwright.cost.state import Items
from meshwright.search.in_flight import in_flight
from meshwright.search.space import Point
from meshwright.search.units import least_size
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
        """By unit."""
        return table.peaks + np.diff(table.elements) * self.working_element_bytes

    def state_bytes(self, table: UnitTable) -> float:
        """Of all coordinates together."""
        return float(table.elements[-1] * self.element_bytes + table.expert_elements[-1] * self.expert_element_bytes)


def room_of(point: Point, items: Items, recipe: Recipe, budget_bytes: float, device: Device) -> Room:
    shape = point.shape
    budget = usable_bytes(budget_bytes, shape.mesh, shape.compile, device)
    degree = 1 if point.zero == 0 else point.hybrid or shape.dp * shape.cp
    few = max(1, min(degree, shape.dp * shape.cp // shape.ep))
    dense, expert = (_element_bytes(point, items, recipe, ranks) for ranks in (degree, few))
    return Room(budget, dense, expert, _working(point, items, recipe))


def _working(point: Point, items: Items, recipe: Recipe) -> float:
    if recipe.master_item_bytes or point.zero < 2 or point.offload == "parameters":
        return 0.0
    return items.gradient + (2 * items.gathered if point.zero == 3 else 0)


def _element_bytes(point: Point, items: Items, recipe: Recipe, degree: int) -> float:
    if point.offload == "parameters":
        return 0.0
    state = 0.0 if point.offload == "optimizer" else items.state / degree
    gradient = items.gradient / (degree if point.zero >= 2 else 1) if _has_gradients(point) else 0.0
    packs = point.zero in (1, 2) and not recipe.master_item_bytes
    return items.parameter / degree + state + gradient + (items.gathered if packs else 0)


def _has_gradients(point: Point) -> bool:
    """Whether gradients are there when activations are fullest: those of the microbatches before, or replicas' buckets."""
    shape = point.shape
    return shape.num_microbatches > 1 or (point.zero == 0 and shape.dp * shape.cp > 1)


def recompute_seconds(table: UnitTable, point: Point, room: Room) -> float:
    """Seconds a microbatch spends at least on recompute, over all stages; infinite where nothing makes it fit."""
    shape = point.shape
    held = in_flight(point.schedule, shape.pp, shape.num_microbatches, point.virtual)
    others = max(0.0, min(held) / point.virtual - 1)  # beside the microbatch at hand
    each = room.budget_bytes - float(room.working_bytes(table).min())
    left = (shape.pp * each - room.state_bytes(table)) / (others + 1)
    wanted = float(table.kept["none"][-1]) - left
    if left < 0:
        return inf
    if point.virtual > 1 and not _even_fits(table, point, room, max(held)):
        return inf
    if wanted <= 0:
        return 0.0
    if wanted > float(table.kept["none"][-1] - table.kept["full"][-1]):
        return inf
    return wanted * table.seconds_per_saved_byte


def least_bytes(table: UnitTable, point: Point, room: Room) -> float:
    """What a device needs at least, with everything recomputed and stages as even as can be."""
    state = room.state_bytes(table) / point.shape.pp
    held = max(in_flight(point.schedule, point.shape.pp, point.shape.num_microbatches, point.virtual))
    kept = held * float(table.kept["full"][-1]) / point.num_stages
    return state + kept + float(room.working_bytes(table).min())


def _even_fits(table: UnitTable, point: Point, room: Room, held: int) -> bool:
    size = least_size(table.num_units, point.num_stages)
    elements = np.diff(table.elements) * room.element_bytes + np.diff(table.expert_elements) * room.expert_element_bytes
    state = point.virtual * size * float(elements.min())
    kept = held * size * float(np.diff(table.kept["full"]).min())
    return state + kept + float(room.working_bytes(table).min()) <= room.budget_bytes
