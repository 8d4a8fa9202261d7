"""An integer program that places contiguous units of the model on devices so that the largest load is smallest.

    units b = 0 … n-1 in a chain (methods/loads.py), devices s = 0 … p-1, each a group of dp · cp · tp ranks

    y[b,s] ∈ {0,1}     unit b lies on one of the devices 0 … s, so that
                       x[b,s] = y[b,s] - y[b,s-1]: it lies on s         e[b,s] = y[b,s] - y[b+1,s]: it is the last up to s
    T                  the largest load: seconds a device is busy with one microbatch

    minimise T
    y[b,s-1] ≤ y[b,s], y[b,p-1] = 1                             every unit on one device                  -> _Rows.one_device
    y[b+1,s] ≤ y[b,s]                                           contiguous, devices in the chain's order  -> _Rows.contiguous
    Σ_b x[b,s] ≥ 1                                              no device without a unit                  -> _Rows.no_idle_device
    Σ_b (compute_b + reduce_b / m) x[b,s] + 2 Σ_b send_b (e[b,s-1] + e[b,s]) ≤ T                          -> _Rows.loads
    Σ_b (state_b + f kept_b) x[b,s] + f Σ_b sent_b e[b,s-1] ≤ room      f = min(p-s, m) in flight (1F1B)  -> _Rows.memory

The factor 2: activations are sent, and their gradients come back. reduce_b: the all-reduce of unit b's gradients over its
replicas, once for m microbatches. This is the program for operator placement by throughput (Tarnawski et al. 2020, 2006.16423) with
one device for every stage. It does not model the bubble; the expected step of its answer is (m + p - 1) T.

HiGHS stops after `NODE_LIMIT` nodes, never after seconds, and the best solution so far is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from meshwright.core.pipeline.kinds import in_flight
from meshwright.searching.methods.builder import Builder
from meshwright.searching.methods.frames import frames, layouts, shortlist
from meshwright.searching.methods.loads import Loads, reduce_seconds
from meshwright.searching.problem import Outcome, Problem
from meshwright.searching.space import Point, Shape

NODE_LIMIT = 500
RELATIVE_GAP = 1e-3
"""A load this close to the smallest is good enough: the error of an estimate is far larger."""


def placement(problem: Problem) -> Outcome:
    builder = Builder(problem)

    def cut(loads: Loads, point: Point) -> tuple[float, tuple[int, ...]] | None:
        """The step that the program expects, and its placement; None where none has room."""
        shape = point.shape
        answer = place(loads, busy_seconds(loads, shape, problem), shape.pp, shape.num_microbatches)
        if answer is None:
            return None
        load, counts = answer
        return (shape.num_microbatches + shape.pp - 1) * load, counts

    return shortlist(builder, [found for frame in frames(problem, builder) for found in layouts(builder, frame, cut)])


def busy_seconds(loads: Loads, shape: Shape, problem: Problem) -> list[float]:
    """Seconds of each unit for one microbatch: compute, and its share of the step's gradient reduction."""
    reduced = (reduce_seconds(unit.weight_bytes, shape.mesh, problem.cluster) for unit in loads.units)
    return [unit.seconds + own / shape.num_microbatches for unit, own in zip(loads.units, reduced, strict=True)]


def place(
    loads: Loads, busy: Sequence[float], num_devices: int, num_microbatches: int
) -> tuple[float, tuple[int, ...]] | None:
    """The smallest largest load, and how many units each device has; None where no placement has room."""
    num_units = len(loads.units)
    if num_devices > num_units:
        return None
    if num_devices == 1:
        return (sum(busy), (num_units,)) if loads.fit((num_units,), num_microbatches) else None
    ends = _solve(_Rows(loads, busy, num_devices, num_microbatches))
    if ends is None:
        return None
    counts = tuple(behind - before for before, behind in pairwise((0, *ends, num_units)))
    return max(device_loads(loads, busy, counts)), counts


def device_loads(loads: Loads, busy: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Seconds each device is busy with one microbatch, communication in and out included."""
    found, start = [], 0
    for count in counts:
        end = start + count
        arrives = loads.units[start - 1].send_seconds if start else 0.0
        leaves = loads.units[end - 1].send_seconds if end < len(loads.units) else 0.0
        found.append(sum(busy[start:end]) + 2 * (arrives + leaves))
        start = end
    return found


def _solve(rows: _Rows) -> list[int] | None:
    """How many units lie on each device and those before it, without the last device."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # here: planning by other methods starts without it
    from scipy.sparse import csr_array

    num_places = rows.num_variables - 1
    matrix = csr_array((rows.values, (rows.row_numbers, rows.columns)), shape=(len(rows.low), rows.num_variables))
    found: Any = milp(
        [0.0] * num_places + [1.0],
        integrality=[1] * num_places + [0],
        bounds=Bounds([0.0] * num_places + [1.0], [1.0] * num_places + [float("inf")]),
        constraints=LinearConstraint(matrix, rows.low, rows.high),
        options={"node_limit": NODE_LIMIT, "mip_rel_gap": RELATIVE_GAP},
    )
    if found.x is None:
        return None
    chosen = [float(value) > 0.5 for value in found.x]
    return [sum(chosen[rows.place(unit, s)] for unit in range(rows.num_units)) for s in range(rows.num_cuts)]


class _Rows:
    """The program's rows, low ≤ A v ≤ high. The unit of seconds is the average load of a device, so T ≥ 1; the unit of bytes is the
    memory that a device has for units."""

    def __init__(self, loads: Loads, busy: Sequence[float], num_devices: int, num_microbatches: int) -> None:
        self.units, self.busy, self.room = loads.units, busy, max(loads.room_bytes, 1.0)
        self.num_units, self.num_devices, self.num_cuts = len(busy), num_devices, num_devices - 1
        self.num_microbatches = num_microbatches
        self.num_variables = self.num_units * self.num_cuts + 1
        self.average = sum(busy) / num_devices
        self.values: list[float] = []
        self.row_numbers: list[int] = []
        self.columns: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.one_device()
        self.contiguous()
        self.no_idle_device()
        self.loads()
        self.memory()

    def place(self, unit: int, s: int) -> int:
        """The number of y[unit, s]."""
        return s * self.num_units + unit

    def one_device(self) -> None:
        for s in range(1, self.num_cuts):
            for unit in range(self.num_units):
                self._add({self.place(unit, s): 1.0, self.place(unit, s - 1): -1.0}, 0.0, 1.0)

    def contiguous(self) -> None:
        for s in range(self.num_cuts):
            for unit in range(self.num_units - 1):
                self._add({self.place(unit, s): 1.0, self.place(unit + 1, s): -1.0}, 0.0, 1.0)

    def no_idle_device(self) -> None:
        for s in range(self.num_devices):
            self._add(*self._on_device(s, [1.0] * self.num_units, 1.0, float(self.num_units)))

    def loads(self) -> None:
        for s in range(self.num_devices):
            row, low, _ = self._on_device(s, [-seconds / self.average for seconds in self.busy], 0.0, 0.0)
            for cut in (s - 1, s):
                self._add_crossing(row, cut, [-2 * unit.send_seconds / self.average for unit in self.units])
            row[self.num_variables - 1] = 1.0
            self._add(row, low, float("inf"))

    def memory(self) -> None:
        for s in range(self.num_devices):
            flight = in_flight("1f1b", self.num_devices, self.num_microbatches, 1)[s]
            sizes = [(unit.state_bytes + flight * unit.kept_bytes) / self.room for unit in self.units]
            row, low, high = self._on_device(s, sizes, -float("inf"), 1.0)
            self._add_crossing(row, s - 1, [flight * unit.sent_bytes / self.room for unit in self.units])
            self._add(row, low, high)

    def _on_device(
        self, s: int, weights: Sequence[float], low: float, high: float
    ) -> tuple[dict[int, float], float, float]:
        """low ≤ Σ_b weight_b x[b,s] ≤ high, as a row over y. On the last device y[b,s] is the constant 1."""
        row = {self.place(unit, s - 1): -weight for unit, weight in enumerate(weights)} if s > 0 else {}
        if s < self.num_cuts:
            return row | {self.place(unit, s): weight for unit, weight in enumerate(weights)}, low, high
        return row, low - sum(weights), high - sum(weights)

    def _add_crossing(self, row: dict[int, float], cut: int, weights: Sequence[float]) -> None:
        """Adds Σ_b weight_b e[b,cut] to a row. Nothing crosses at the ends of the chain."""
        if not 0 <= cut < self.num_cuts:
            return
        for unit in range(self.num_units - 1):
            here, behind = self.place(unit, cut), self.place(unit + 1, cut)
            row[here] = row.get(here, 0.0) + weights[unit]
            row[behind] = row.get(behind, 0.0) - weights[unit]

    def _add(self, row: dict[int, float], low: float, high: float) -> None:
        number = len(self.low)
        self.values += row.values()
        self.columns += row.keys()
        self.row_numbers += [number] * len(row)
        self.low.append(low)
        self.high.append(high)
