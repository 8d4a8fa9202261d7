"""Lower bounds on the seconds of a step: no plan of a kind is faster, whatever its cut and recompute. They order the search and end
it.

T = T_f + T_b: a microbatch through the whole model, nothing recomputed; p coordinates, m microbatches, stage i takes
t_i = f_i + b_i, Σ t_i ≥ T, f_i ≤ r t_i. Any schedule: m t_i on its busiest coordinate, so m T / p, and m times what the busiest
has at least, since units are not cut                                                             -> busiest_seconds
More of it, by the kind of schedule: core/pipeline/kinds.py. For one stage a coordinate, with c_i the weight of a stage that takes a
second: the least largest weight over all cuts is T / Σ 1/c_i                                     -> shared_out

    dp            gathers and reductions: what is longer than the compute that could hide it, and the slowdown of what hides
    update        of the elements a rank holds on average
    Both are counted for an average coordinate. So they are added to the seconds of an average coordinate, but not to those of the
    slowest one, nor to those that a microbatch takes through all of them                          -> Played
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import inf
from typing import Any

import numpy as np

from meshwright.core.pipeline.kinds import ScheduleKind, kind_of, placement_of
from meshwright.core.pipeline.placement import Placement
from meshwright.core.plan import Mesh, ZeroStage
from meshwright.cost.communication.links import Group, axis_group, collective_seconds, send_seconds
from meshwright.cost.compute.optimizer_update import update_seconds
from meshwright.rules.kinds import cached_in_value
from meshwright.searching.bounds.load_balance import least_busiest, least_heaviest, shared_out, waiting
from meshwright.searching.bounds.memory import Room
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape
from meshwright.searching.unit_table import MODES, Places, Row, UnitTable
from meshwright.searching.units import Cut

SLACK = 1 - 1e-9
"""Every bound is lowered by this factor: if rounding lifted a bound above the truth, the best plan would be cut off."""


@dataclass(frozen=True)
class Busy:
    """Seconds that a coordinate is busy with its own units in a step, counted in several ways. Each counts other communication as
    hidden, and each is a lower bound."""

    rows: list[tuple[Row, int]]
    """Sums over the first units, and for how many microbatches a recompute adds to them."""
    beyond_seconds: float
    """Seconds that every step takes in addition to the weight of its heaviest stage (cuts/best_cut.py)."""


@dataclass(frozen=True)
class Played:
    """Lower bounds on the seconds of a schedule."""

    average: float
    """Seconds that an average coordinate is busy or waiting."""
    longest: float
    """Seconds that some coordinate is busy, or that one microbatch takes through all stages."""


@dataclass(frozen=True)
class Needs:
    """Lower bounds on the seconds that a state (ZeRO, groups, offload) adds, with the recompute that it makes necessary."""

    each: float
    """Added to every microbatch on every coordinate."""
    once: float
    """Added once a step."""
    seconds: float
    """Lower bound on a step, whatever the schedule."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the plans that divide a microbatch in one way."""

    problem: Problem
    table: UnitTable

    @cached_property
    def stateless_cuts(self) -> dict[tuple[object, ...], Any]:
        """All cuts by their lower bounds, by shape and schedule (cuts/ranked_cuts.py)."""
        return {}

    @cached_property
    def forward_seconds(self) -> float:
        return float(self.table.forward(0, self.table.num_units))

    @cached_property
    def backward_seconds(self) -> float:
        return float(self.table.backward(0, self.table.num_units))

    @cached_property
    def slowest_unit_seconds(self) -> float:
        """Forward and backward of the unit that takes longest."""
        return float(self.table.unit_seconds.max())

    @cached_property
    def forward_shares(self) -> tuple[float, float]:
        """The largest share of its time that a first stage can spend in forward, and the largest of any other stage."""
        table = self.table
        forwards = [np.diff(table.forward_launch), np.diff(table.forward_kernel), table.forward(*table.alone)]
        backwards = [np.diff(table.backward_launch), np.diff(table.backward_kernel), table.backward(*table.alone)]
        both = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
        shares = [np.divide(f, b, out=np.zeros_like(f), where=b > 0) for f, b in zip(forwards, both, strict=True)]
        of_unit = np.clip(np.max(shares, axis=0), 0.5, 1.0)
        return float(of_unit.max()), float(of_unit[1:].max(initial=0.5))

    def of_shape(self, shape: Shape) -> float:
        """Lower bound for any schedule and any state."""
        return max(self.evenly(shape), SLACK * shape.num_microbatches * self.slowest_unit_seconds)

    def evenly(self, shape: Shape) -> float:
        """The same for an average coordinate."""
        return SLACK * shape.num_microbatches * (self.forward_seconds + self.backward_seconds) / shape.pp

    def of_once(self, point: Point) -> float:
        """Seconds that the state adds at least once a step, whatever the schedule and the number of microbatches."""
        each, once = self.exposed(point)
        return SLACK * (each + once + self.after(point))

    def needs(self, point: Point, again: float) -> Needs:
        """again: seconds of recompute that a microbatch needs, over all stages."""
        exposed, once = self.exposed(point, again)
        shape = point.shape
        each, once = exposed + again / shape.pp, once + self.after(point)
        total = (self.forward_seconds + self.backward_seconds) / shape.pp + each
        seconds = SLACK * max(shape.num_microbatches * total + once, shape.num_microbatches * self.slowest_unit_seconds)
        return Needs(each, once, seconds)

    def needs_in(self, room: Room) -> Needs | None:
        """What a point needs with the recompute that its memory makes necessary; None where no recompute makes it fit."""
        again = room.recompute_seconds
        return None if again == inf else self.needs(room.point, again)

    def with_turns(self, shape: Shape, needs: Needs, schedule: ScheduleKind, virtual: int) -> float:
        """Lower bound under this schedule. It does not depend on the memory that the schedule needs."""
        played = self._played(shape, schedule, virtual, needs.each)
        return max(self.of_shape(shape), SLACK * max(played.average + needs.once, played.longest + self.overhead))

    def of_turns(self, shape: Shape, schedule: ScheduleKind, virtual: int) -> float:
        """Lower bound under this schedule, for any state."""
        played = self._played(shape, schedule, virtual, 0.0)
        return max(self.of_shape(shape), SLACK * max(played.average, played.longest))

    def of_point(self, room: Room) -> float:
        """Lower bound for a point; infinite where it cannot fit."""
        point, needs = room.point, self.needs_in(room)
        if needs is None:
            return inf
        return self._with_own_state(point, self.with_turns(point.shape, needs, point.schedule, point.virtual))

    def _with_own_state(self, point: Point, least: float) -> float:
        """Lower bound on the busiest coordinate, with the gathers and reductions of its own parameters; `least` where that is more.

        Compute hides no more communication than it takes itself, so communication counts in place of the compute beside it. These
        seconds add up over units, so no cut shares them out more evenly than `least_heaviest` does.
        """
        shape = point.shape
        if shape.pp == 1 or point.offload == "parameters":
            return least
        found = least / SLACK - self.overhead
        boundaries = self._boundaries(shape) if point.virtual == 1 else None
        for row, _ in self.rows_with_state(point):
            if row.min() < 0:
                continue
            if point.virtual == 1:
                found = least_heaviest(row, shape.pp, found, boundaries)
            else:
                found = max(found, least_busiest(row, shape.pp, placement_of(point.schedule)))
        return max(least, SLACK * (found + self.overhead))

    @cached_in_value
    def _boundaries(self, shape: Shape) -> Row:
        """For each unit, a lower bound on a step in which a stage ends behind it: one microbatch goes through all stages, and the
        messages of the others go over this link."""
        through = self.forward_seconds + self.backward_seconds + 2 * self._one_way(shape, shape.pp - 1)
        through -= float(self.table.weights[-1])
        found = through + (shape.num_microbatches - 1) * self.hops(shape)
        found[-1] = 0.0
        return found

    def busy(self, point: Point) -> Busy:
        """The work by which `best_cut` weighs stages, in addition to their weight in the schedule."""
        if point.shape.pp == 1 or point.virtual > 1 or point.offload == "parameters":
            return Busy([], 0.0)
        rows = [(np.concatenate(([0.0], np.cumsum(row))), times) for row, times in self.rows_with_state(point)]
        return Busy(rows, self._through(point))

    def rows_with_state(self, point: Point) -> Iterator[tuple[Row, int]]:
        """Seconds of each unit in a step, in each case: gathers take longer than forward, or not, and reductions take longer than
        backward, or not. With each, the number of microbatches whose recompute adds to these seconds: recompute hides reductions
        too."""
        table, m, zero = self.table, point.shape.num_microbatches, point.zero
        gather, reduce, across = self._state_by_unit(point)
        inner = np.diff(table.inner_forward), np.diff(table.inner_backward["none"])
        launches = np.diff(table.forward_launch), np.diff(table.backward_launch)
        kernels = np.diff(table.forward_kernel), np.diff(table.backward_kernel)
        hides_forward, hides_backward = (sum(parts) for parts in zip(inner, launches, kernels, strict=True))
        forward, backward = (
            (hides_forward, hides_backward) if table.is_cpu else (kernels[0] + inner[0], kernels[1] + inner[1])
        )
        forwards, backwards = [m * forward], [(m * backward, m)]
        if zero > 0:
            forwards.append(m * forward + (m if zero == 3 else 1) * (gather - hides_forward))
        beside = reduce + (gather * table.regathered_shares if zero == 3 else 0.0)
        hiding = m if zero >= 2 else 1
        backwards.append((m * backward + hiding * (beside - hides_backward) + across, m - hiding))
        if zero >= 2:
            backwards.append((m * backward + beside + across - hides_backward, m - 1))
        return ((first + second, times) for first, (second, times) in product(forwards, backwards))

    def _state_by_unit(self, point: Point) -> tuple[Row, Row, Row]:
        """Seconds of the gather of each unit's parameters, of the reduction of its gradients, and of that between groups."""
        shape, (dense, expert) = point.shape, self.table.unit_elements
        kinds = ((dense, Group(shape.replicas, shape.tp)), (expert, _expert_ranks(shape.mesh)))
        found = np.zeros((3, self.table.num_units))
        for elements, everyone in kinds:
            total = float(elements.sum())
            if total:
                found += np.outer(self._of_state(point.zero, point.hybrid, total, everyone, 1), elements / total)
        return found[0], found[1], found[2]

    def exposed_of_rows(self, point: Point, begins: Places, ends: Places) -> tuple[Row, Row, Row]:
        """Seconds that compute does not hide at least, of many rows of units: of gathers before forward, of reductions behind each
        backward, and of those behind the last one in addition. Backward hides most where everything is recomputed."""
        table = self.table
        if point.shape.replicas == 1:
            return np.zeros(ends.shape), np.zeros(ends.shape), np.zeros(ends.shape)
        rows = [np.concatenate(([0.0], np.cumsum(row))) for row in self._state_by_unit(point)]
        gather, reduce, across = (row[ends] - row[begins] for row in rows)
        longest = np.max([table.backward(begins, ends, mode) for mode in MODES], axis=0)
        each = np.maximum(0.0, reduce - longest) if point.zero >= 2 else np.zeros(ends.shape)
        return (
            np.maximum(0.0, gather - table.forward(begins, ends)),
            each,
            np.maximum(0.0, reduce + across - longest) - each,
        )

    def of_cut(self, room: Room, cut: Cut, least: float) -> float:
        """Lower bound for a point with these stages. least: seconds that no cut is faster than, where cuts were compared, or 0."""
        point, table = room.point, self.table
        p, m = point.shape.pp, point.shape.num_microbatches
        stages = [(float(table.forward(b, e)), float(table.backward(b, e))) for b, e in pairwise((0, *cut))]
        busy = [sum(f + b for (f, b), home in zip(stages, point.homes, strict=True) if home == c) for c in range(p)]
        waits = [sum(f for f, _ in stages[:i]) for i in range(p)]
        kind = kind_of(point.schedule)
        if not kind.splits_backward:
            waits = [wait + sum(b for _, b in stages[:i]) for i, wait in enumerate(waits)]
        seconds = max(wait + m * work for wait, work in zip(waits, busy, strict=True))
        seconds = max(seconds, kind.cut_seconds(stages, m))
        return max(self.of_every_cut(room, least), SLACK * (seconds + self.overhead))

    def of_every_cut(self, room: Room, least: float) -> float:
        """Lower bound for a point with any cut. least: as for `of_cut`."""
        return max(least, self.of_point(room))

    def with_heaviest(self, point: Point, weight: float) -> float:
        """Lower bound where every cut has a stage that weighs at least so much; 0 where nothing follows from that."""
        if not weight or point.shape.num_microbatches == 1:
            return 0.0
        return SLACK * (self._through(point) + weight + self.overhead)

    # ------------------------------------------------------------ the schedule

    def expected(self, point: Point, needs: Needs) -> float:
        """An estimate, not a bound: about the seconds of a good cut, with the bubble of even stages (cost/play.py)."""
        shape, p = point.shape, point.shape.pp
        each = max(
            (self.forward_seconds + self.backward_seconds) / p,
            self.busiest_seconds(p, placement_of(point.schedule), point.virtual),
        )
        forward, weights = self.forward_seconds / p, float(self.table.weights[-1]) / p
        inputs = max(0.0, self.backward_seconds / p + needs.each - weights)
        idle = kind_of(point.schedule).idle(forward, inputs, weights, point.virtual)
        idle += self._first_gather(point)  # each stage gathers when the first microbatch reaches it
        return shape.num_microbatches * (each + needs.each) + (p - 1) * idle + needs.once

    def _first_gather(self, point: Point) -> float:
        """Seconds of the gather that compute does not hide on a coordinate, where parameters are gathered once a step."""
        shape = point.shape
        if shape.pp == 1 or shape.replicas == 1 or point.zero not in (1, 2):
            return 0.0
        return self._shown(self._gathers(shape.mesh, point.zero, point.hybrid)[0], self.forward_seconds / shape.pp)

    def _played(self, shape: Shape, schedule: ScheduleKind, virtual: int, each: float) -> Played:
        """each: seconds that dp adds to every microbatch on every coordinate."""
        p, m = shape.pp, shape.num_microbatches
        forward, total = self.forward_seconds, self.forward_seconds + self.backward_seconds + p * each
        if p == 1:
            return Played(m * total, m * total)
        kind = kind_of(schedule)
        first = total - (float(self.table.weights[-1]) if kind.splits_backward else 0.0)
        num_messages = p * virtual - 1 - (kind.placement == "v")  # where a V turns, two stages share a coordinate
        one_way = self._one_way(shape, num_messages)
        chain = first + 2 * one_way
        # without recompute, all of which may be on other coordinates
        busiest = m * self.busiest_seconds(p, kind.placement, virtual)
        least_hop = self._hop(shape, float(self.table.sent.min())) if len(self.table.sent) else 0.0
        links = m * virtual * least_hop
        longest = max(chain, busiest, links, self._divided(shape, num_messages, chain))
        average = m * total / p
        if kind.has_turns:
            return Played(average + self._waiting(p, kind.splits_backward), longest)
        return Played(average, max(longest, self._with_bubble(shape, schedule, forward, total, one_way)))

    def _divided(self, shape: Shape, num_messages: int, chain: float) -> float:
        """Lower bound from messages of unlike size: every cut either sends a large message with each microbatch, or has a stage
        that holds all units between two small ones."""
        m = shape.num_microbatches
        found = (
            max(chain + (m - 1) * self._hop(shape, size), m * heaviest)
            for number, size, heaviest in self.table.divisions
            if number >= num_messages
        )
        return min(found, default=0.0)

    def _one_way(self, shape: Shape, num_messages: int) -> float:
        """Seconds of a microbatch's messages from the first stage to the last, if they were the smallest that any cut sends."""
        sizes, times = np.unique(np.sort(self.table.sent)[:num_messages], return_counts=True)
        return sum(int(count) * self._hop(shape, float(size)) for size, count in zip(sizes, times, strict=True))

    def hops(self, shape: Shape) -> Row:
        """Seconds that each unit's message takes if the unit is the last of a stage; 0 for the last unit."""
        return np.array([*(self._hop(shape, float(size)) for size in self.table.sent), 0.0])

    @cached_in_value
    def busiest_seconds(self, p: int, placement: Placement, virtual: int) -> float:
        """Lower bound on the seconds of a microbatch on the busiest coordinate, for any cut. Launches and kernels are looked at
        apart: a stage takes the longer of both sums."""
        return max(
            least_heaviest(work, p) if virtual == 1 else least_busiest(work, p, placement) for work in self._works
        )

    @cached_property
    def _works(self) -> list[Row]:
        """Seconds of every unit that add up over units: launches, and kernels, each with the communication inside blocks; on a CPU
        all of these together."""
        table = self.table
        inner = np.diff(table.inner_forward + table.inner_backward["none"])
        launches = np.diff(table.forward_launch + table.backward_launch)
        kernels = np.diff(table.forward_kernel + table.backward_kernel)
        return [launches + kernels + inner] if table.is_cpu else [launches + inner, kernels + inner]

    def _hop(self, shape: Shape, size: float) -> float:
        """Seconds of a message between stages."""
        return self._send_seconds(size, shape.mesh)

    @cached_in_value
    def _send_seconds(self, size: float, mesh: Mesh) -> float:
        return send_seconds(size, axis_group(mesh, "pp"), self.problem.cluster)

    def _through(self, point: Point) -> float:
        """Seconds that the first microbatch takes before the heaviest stage begins the others. Where backward is split, gradients
        of its inputs may be made between these."""
        one_way = self._one_way(point.shape, point.shape.pp - 1)
        if kind_of(point.schedule).splits_backward:
            return self.forward_seconds + one_way
        return self.forward_seconds + self.backward_seconds + 2 * one_way

    def _with_bubble(self, shape: Shape, schedule: ScheduleKind, forward: float, total: float, one_way: float) -> float:
        p, m, kind = shape.pp, shape.num_microbatches, kind_of(schedule)
        through = forward + one_way if kind.splits_backward else total + 2 * one_way
        if m == 1 and not kind.splits_backward:
            return through  # what a stage weighs then follows from the cut alone
        return through + shared_out(total, *waiting(schedule, p, m, *self.forward_shares))

    def _waiting(self, p: int, splits_backward: bool) -> float:
        """Seconds that an average coordinate waits for its first microbatch and after its last one: coordinate i waits for the
        first i stages, each of them at least one unit."""
        table = self.table
        each = table.forward(*table.alone) if splits_backward else table.unit_seconds
        others = (p - 1) * (p - 2) / (2 * p) * float(each[1:-1].min()) if p > 2 else 0.0
        return (p - 1) / p * float(each[0]) + others

    # ------------------------------------------------------------ the state

    def exposed(self, point: Point, again: float = 0.0) -> tuple[float, float]:
        """Seconds that gathers and reductions add on an average coordinate: to each microbatch, and once a step. again: seconds of
        recompute in a microbatch, which hide them too."""
        shape, zero = point.shape, point.zero
        if shape.replicas == 1:
            return 0.0, 0.0
        forward, backward = self.forward_seconds / shape.pp, (self.backward_seconds + again) / shape.pp
        gather, again_gather, reduce, across = self._gathers(shape.mesh, zero, point.hybrid)
        if zero <= 1:
            return 0.0, self._shown(gather, forward) + self._shown(reduce + across, backward)
        last = self._shown(reduce + across, backward) - self._shown(reduce, backward)
        if zero == 2:
            return self._shown(reduce, backward), self._shown(gather, forward) + last
        return self._shown(gather, forward) + self._shown(again_gather + reduce, backward), last

    @cached_in_value
    def _gathers(self, mesh: Mesh, zero: ZeroStage, hybrid: int | None) -> tuple[float, float, float, float]:
        """Seconds of gathers for forward and for backward, and of reductions, inside sharding groups and between them, on an
        average coordinate."""
        blocks = max(1, self.problem.units.num_repeated // mesh.pp)  # the ends are in one group, or in none
        dense, expert, shares = *self.table.unit_elements, self.table.regathered_shares
        kinds = ((dense, Group(mesh.dp * mesh.cp, mesh.tp), blocks), (expert, _expert_ranks(mesh), 1))
        whole, again = np.zeros(3), 0.0
        for elements, everyone, count in kinds:
            whole += self._of_state(zero, hybrid, float(elements.sum()) / mesh.pp, everyone, count)
            again += self._of_state(zero, hybrid, float((elements * shares).sum()) / mesh.pp, everyone, count)[0]
        gather, reduce, across = whole.tolist()
        return gather, again, reduce, across

    def _of_state(
        self, zero: ZeroStage, hybrid: int | None, elements: float, everyone: Group, count: int
    ) -> tuple[float, float, float]:
        """Seconds of gathers, of reductions, and of reductions between sharding groups. everyone: the ranks that hold these
        elements. count: the number of groups of parameters, each with its own calls."""
        gradient = self._gradient_bytes * elements
        if zero == 0:
            return 0.0, self._seconds("all_reduce", gradient, everyone), 0.0
        degree = min(hybrid or everyone.size, everyone.size)
        inner = Group(degree, everyone.stride)
        outer = Group(everyone.size // degree, everyone.stride * degree)
        gather = self._of_groups("all_gather", self._gathered_bytes * elements / degree, inner, count)
        reduce = self._of_groups("reduce_scatter", gradient, inner, count)
        return gather, reduce, self._seconds("all_reduce", gradient / degree, outer)

    def _of_groups(self, kind: str, num_bytes: float, group: Group, count: int) -> float:
        """Seconds of so many calls, with the copies that pack parameters for them."""
        if group.size == 1 or not num_bytes:
            return 0.0
        copied = 0.0
        if self.problem.recipe.system.packs and self.problem.cluster.device.constants is not None:
            rate = self.problem.cluster.device.bytes_per_second or inf
            times = 1 + group.size if kind == "all_gather" else 1
            copied = 2 * num_bytes * times / (rate * self.problem.cluster.device.constants.copy_share)
        return count * self._seconds(kind, num_bytes / count, group) + copied

    def _seconds(self, kind: str, num_bytes: float, group: Group) -> float:
        if group.size == 1 or not num_bytes:
            return 0.0
        if self.problem.cluster.collectives:
            return self._measured(kind, num_bytes, group)
        return collective_seconds(kind, num_bytes, group, self.problem.cluster)  # type: ignore[arg-type]

    def _measured(self, kind: str, num_bytes: float, group: Group) -> float:
        """Measured seconds need not lie on a line: many small calls can be faster than one large call. So the best measured rate is
        the bound."""
        found = [
            point.seconds / point.num_bytes
            for point in self.problem.cluster.collectives
            if point.kind == kind and point.num_ranks == group.size and point.num_bytes > 0
        ]
        return num_bytes * min(found) if found else 0.0

    def _shown(self, communication: float, compute: float) -> float:
        """The least seconds of communication that compute does not hide."""
        constants = self.problem.cluster.device.constants
        slowdown = constants.overlap_slowdown if constants else 0.0
        exposed = max(0.0, communication - compute)
        return (
            exposed + slowdown * (communication - exposed) if self.problem.recipe.system.overlaps_reduction else exposed
        )

    @cached_property
    def _gradient_bytes(self) -> int:
        system = self.problem.recipe.system
        return system.reduce_item_bytes or system.gradient_item_bytes or system.parameter_item_bytes or 4

    @cached_property
    def _gathered_bytes(self) -> int:
        return self.problem.recipe.system.gather_item_bytes or 2

    def after(self, point: Point) -> float:
        """Seconds of the optimizer's update, and of a step's fixed overhead."""
        return self._update(point) + self.overhead

    @cached_property
    def overhead(self) -> float:
        constants = self.problem.cluster.device.constants
        return constants.step_overhead_seconds if constants else 0.0

    def _update(self, point: Point) -> float:
        if point.offload != "none":
            return 0.0
        shape = point.shape
        degree = point.sharding_ranks
        rest = max(1, degree // shape.ep)
        held = float(self.table.elements[-1]) / degree + float(self.table.expert_elements[-1]) / rest
        return update_seconds(held / shape.pp, self.problem.cluster.device, self.problem.recipe.optimizer_slots)


def _expert_ranks(mesh: Mesh) -> Group:
    """The ranks that hold the same experts: fewer than those that hold the same other parameters, and further apart
    (cost/communication/step_calls.py)."""
    if mesh.dp == mesh.ep:
        return axis_group(mesh, "cp")
    return Group(mesh.dp // mesh.ep * mesh.cp, mesh.tp * mesh.ep)
