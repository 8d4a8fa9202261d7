"""Many cuts of one model, played at once (cost/timing.py).

Who waits for whom follows from the order of work alone, not from the seconds. So one pass through the order plays all cuts: each
time is an array with an entry for each cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from meshwright.core.pipeline.schedule import ActionKind, Order
from meshwright.cost.timing import Machine, MessageRules, Rule, Transfers
from meshwright.searching.unit_table import Row

NO_TIME: Any = 0.0


@dataclass(frozen=True)
class StageOfMany:
    """The seconds of one stage in every cut, named as in StageSeconds."""

    forward_seconds: Row
    backward_seconds: Row
    weights: Row
    gather_once: Row
    reduce_once: Row
    transfer: Row

    def of(self, kind: ActionKind) -> Row:
        if kind == "forward":
            return self.forward_seconds
        if kind == "backward":
            return self.backward_seconds
        weights = np.minimum(self.weights, self.backward_seconds)
        return weights if kind == "backward_weights" else np.asarray(self.backward_seconds - weights)


def steps_of_many(order: Order, stages: Sequence[StageOfMany], transfers: Transfers) -> Row:
    """Seconds of the step of every cut."""
    rules = MessageRules(order, stages, transfers)
    rows = [rules.row(coordinate) for coordinate in range(len(order))]
    machine = _MachineOfMany(_lighter(rows), rules.num_microbatches, len(stages))
    machine.holds = transfers != "asynchronous"
    machine.run()
    return np.asarray(np.max(machine.clock, axis=0))


def _lighter(rows: list[list[tuple[Rule, int]]]) -> list[list[tuple[Rule, int]]]:
    """With what takes no time in any cut marked as such: links that carry nothing, and nothing behind an action."""
    every = {id(rule): rule for row in rows for rule, _ in row}
    used = {rule.link for rule in every.values() if np.any(rule.wire)}
    lighter = {
        key: rule._replace(
            wire=rule.wire if rule.link in used else NO_TIME,
            extra_after=rule.extra_after if np.any(rule.extra_after) else NO_TIME,
        )
        for key, rule in every.items()
    }
    return [[(lighter[id(rule)], microbatch) for rule, microbatch in row] for row in rows]


class _MachineOfMany(Machine):
    """Coordinates and links whose times are arrays. What is not made yet is an infinite number, as in Machine."""

    holds = True
    """Whether messages hold who sends or takes them."""

    def advance(self, coordinate: int) -> list[int]:
        made: list[Any] = self.made
        arrived: list[Any] = self.arrived
        link_free: list[Any] = self.link_free
        clock: Any = self.clock[coordinate]
        free_at: Any = self.free_at[coordinate]
        row, spans, woken = self.rows[coordinate], self.spans[coordinate], []
        for place in range(len(spans), len(row)):
            rule, microbatch = row[place]
            need, slot = rule.need + microbatch, rule.slot + microbatch
            if made[need] is inf:
                self.waiting[need] = coordinate
                break
            start = np.maximum(free_at, arrived[need])
            if self.holds:
                left = np.maximum(made[need], spans[-1][0] if rule.asks_ahead else clock)
                start = np.maximum(left + rule.held_by_receive, start)
            end = start + rule.seconds
            spans.append((start, end))
            made[slot] = arrived[slot] = end
            if rule.wire is not NO_TIME:
                arrived[slot] = link_free[rule.link] = np.maximum(link_free[rule.link], end) + rule.wire
            clock = free_at = end if rule.extra_after is NO_TIME else end + rule.extra_after
            if self.holds:
                free_at = np.maximum(end + rule.held_by_send, clock)
            if slot in self.waiting:
                woken.append(self.waiting.pop(slot))
        self.clock[coordinate], self.free_at[coordinate] = clock, free_at
        return woken
