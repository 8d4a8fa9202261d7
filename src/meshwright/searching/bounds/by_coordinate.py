"""Lower bounds on points with several stages by what each coordinate has memory for (coordinate_loads.py)."""

from __future__ import annotations

import numpy as np

from meshwright.core.pipeline.kinds import kind_of
from meshwright.searching.bounds.coordinate_loads import CoordinateLoads, HeldMicrobatches
from meshwright.searching.bounds.memory import Room
from meshwright.searching.bounds.step_seconds import SLACK, Bounds
from meshwright.searching.unit_table import Row, UnitTable


def least_of_any_cut(bounds: Bounds, room: Room) -> float:
    """Lower bound for a point with any cut; infinite where no cut fits."""
    point, table = room.point, bounds.table
    loads = CoordinateLoads(
        table=table,
        held=room.held_by_coordinate(),
        homes=(point.homes[0], point.homes[-1]),
        state_bytes=room.bytes_of(*table.alone),
        working_bytes=room.between_ends,
        budget_bytes=room.budget_bytes,
        waits=_waits(table, point.shape.pp, splits_backward=kind_of(point.schedule).splits_backward),
    )
    return SLACK * (loads.least_busiest(bounds.rows_with_state(point)) + bounds.overhead)


def least_of_any_schedule(bounds: Bounds, room: Room, held: HeldMicrobatches) -> float:
    """The same whatever the schedule. held: as few microbatches as any of them holds."""
    shape, table = room.point.shape, bounds.table
    loads = CoordinateLoads(
        table=table,
        held=held,
        homes=None,
        state_bytes=room.bytes_of(*table.alone),
        working_bytes=room.working.by_unit,
        budget_bytes=room.budget_bytes,
        waits=_waits(table, shape.pp, splits_backward=True),
    )
    row = shape.num_microbatches * table.unit_seconds
    return SLACK * (loads.least_busiest([(row, shape.num_microbatches)]) + bounds.overhead)


def _waits(table: UnitTable, p: int, *, splits_backward: bool) -> Row:
    """Seconds until the first microbatch reaches a coordinate, through a unit at least on each before it, and back behind its last
    work there, where backward is not split."""
    each = table.forward(*table.alone) if splits_backward else table.unit_seconds
    least = float(each[1:-1].min()) if table.num_units > 2 else 0.0
    before = np.arange(p)
    return np.where(before > 0, float(each[0]) + (before - 1) * least, 0.0)
