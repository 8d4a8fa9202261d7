"""An integer program that places contiguous units of the model on devices so that the largest load is smallest.

    units b = 0 … n-1 in a chain (methods/loads.py), devices s = 0 … p-1, each a group of dp · cp · tp ranks

    y[b,s] ∈ {0,1}     unit b lies on one of the devices 0 … s, so that
                       x[b,s] = y[b,s] - y[b,s-1]: it lies on s         e[b,s] = y[b,s] - y[b+1,s]: it is the last up to s
    T                  the largest load: seconds a device is busy with one microbatch

    minimise T
    y[b,s-1] ≤ y[b,s], y[b,p-1] = 1                             every unit on one device                        -> one_device
    y[b+1,s] ≤ y[b,s]                                           contiguous, devices in the chain's order        -> contiguous
    Σ_b x[b,s] ≥ 1                                              no device without a unit                        -> no_idle_device
    Σ_b (compute_b + reduce_b / m) x[b,s] + 2 Σ_b send_b (e[b,s-1] + e[b,s]) ≤ T                                -> loads
    Σ_b (state_b + f kept_b) x[b,s] + f Σ_b sent_b e[b,s-1] ≤ room      f = min(p-s, m) in flight (1F1B)        -> memory

The factor 2: activations are sent, and their gradients come back. reduce_b: the all-reduce of unit b's gradients over its
replicas, once for m microbatches. This is the program for operator placement by throughput (Tarnawski et al. 2020, 2006.16423) with
one device for every stage. It does not model the bubble; the expected step of its answer is (m + p - 1) T.

HiGHS stops after `NODE_LIMIT` nodes, never after seconds, and the best solution so far is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

from meshwright.core.pipeline.kinds import in_flight
from meshwright.searching.methods.builder import Builder
from meshwright.searching.methods.frames import frames, layouts, shortlist
from meshwright.searching.methods.loads import Loads, reduce_seconds
from meshwright.searching.problem import Outcome, Problem
from meshwright.searching.sharding.integer_program import ONE, Program, Terms, minus, plus
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
    ends = _Placement(loads, busy, num_devices, num_microbatches).ends()
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


class _Placement:
    """The program. Its unit of seconds is the average load of a device, so that T ≥ 1. Its unit of bytes is the memory that a
    device has for units."""

    def __init__(self, loads: Loads, busy: Sequence[float], num_devices: int, num_microbatches: int) -> None:
        self.units, self.busy, self.room = loads.units, busy, max(loads.room_bytes, 1.0)
        self.num_units, self.num_devices, self.num_microbatches = len(busy), num_devices, num_microbatches
        self.average = sum(busy) / num_devices
        self.program = Program()
        self.y = [[self.program.variable(whole=True) for _ in busy] for _ in range(num_devices - 1)]
        self.largest = self.program.variable(least=1.0, most=inf)
        self.program.pay(self.largest, 1.0)
        self.one_device()
        self.contiguous()
        self.no_idle_device()
        self.loads()
        self.memory()

    def ends(self) -> list[int] | None:
        """How many units lie on each device and those before it, without the last device; None where no placement has room."""
        solved = self.program.solve(node_limit=NODE_LIMIT, gap=RELATIVE_GAP)
        if solved is None:
            return None
        chosen = [value > 0.5 for value in solved[0]]
        return [sum(chosen[variable] for terms in row for variable in terms) for row in self.y]

    def until(self, unit: int, s: int) -> Terms:
        """y[unit, s]: 0 before the first device, 1 on the last."""
        if s < 0:
            return {}
        return self.y[s][unit] if s < len(self.y) else ONE

    def on(self, s: int, weights: Iterable[float]) -> list[Terms]:
        """weight_b x[b,s] of every unit b."""
        return [
            plus(minus(self.until(unit, s), self.until(unit, s - 1)), factor=weight)
            for unit, weight in enumerate(weights)
        ]

    def crossing(self, s: int, weights: Sequence[float]) -> list[Terms]:
        """weight_b e[b,s] of every unit b but the last, behind which nothing is sent."""
        return [
            plus(minus(self.until(unit, s), self.until(unit + 1, s)), factor=weights[unit])
            for unit in range(self.num_units - 1)
        ]

    def one_device(self) -> None:
        for s in range(1, len(self.y)):
            for placed in self.on(s, [1.0] * self.num_units):
                self.program.between(placed, 0.0, 1.0)

    def contiguous(self) -> None:
        for s in range(len(self.y)):
            for last in self.crossing(s, [1.0] * self.num_units):
                self.program.between(last, 0.0, 1.0)

    def no_idle_device(self) -> None:
        for s in range(self.num_devices):
            self.program.between(plus(*self.on(s, [1.0] * self.num_units)), 1.0, float(self.num_units))

    def loads(self) -> None:
        sends = [2 * unit.send_seconds / self.average for unit in self.units]
        for s in range(self.num_devices):
            compute = self.on(s, [seconds / self.average for seconds in self.busy])
            self.program.at_least(self.largest, plus(*compute, *self.crossing(s - 1, sends), *self.crossing(s, sends)))

    def memory(self) -> None:
        for s, flight in enumerate(in_flight("1f1b", self.num_devices, self.num_microbatches, 1)):
            held = self.on(s, [(unit.state_bytes + flight * unit.kept_bytes) / self.room for unit in self.units])
            received = self.crossing(s - 1, [flight * unit.sent_bytes / self.room for unit in self.units])
            self.program.between(plus(*held, *received), -inf, 1.0)
