"""When every action of an order of work starts and ends.

    start of an action = max(end of the action before it, arrival of what it needs)
    asynchronous   a message leaves when it is made and the link is free, and arrives a transfer later; nobody is held
    requested      a message leaves when it is made and its taker has asked for it, and arrives a transfer later. Takers ask one
                   action ahead, but for a stage's first message, and for a gradient of what the action before makes
                   (gloo's: what is sent stays where it is until the other side asks for it)
    blocking       a message leaves when it is made and its taker has nothing else to do; it holds the taker until it
                   arrives, and the maker for one transfer; what a coordinate sends and what it takes pass each other
                   (Megatron-LM's p2p of 1F1B: send forward and receive backward in one call, then wait for both)
    exposed        seconds between when an action could start, were transfers free from now on, and when it starts

The order is fixed, so time is a recurrence and no queue of events is needed: a coordinate runs until it needs what is not
made yet, and whoever makes it sets it going again                                             -> Machine.run, Machine.advance
Links are one way, keep the order of the sends, and carry one message at a time.

A message lies in a slot: a band of m slots for each stage's activations, another for each stage's gradients, one that is
always full for work that needs nothing, one that nobody looks at for work that sends nothing.   -> MessageRules
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal, NamedTuple

from meshwright.core.codec import Value
from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.schedule import Action, ActionKind, Order

Transfers = Literal["asynchronous", "requested", "blocking"]


class StageSeconds(Value, kw_only=True):
    """Seconds of one microbatch on one stage, by part."""

    forward: float
    backward: float
    recompute: float = 0.0
    weights: float = 0.0
    """The part of backward that makes gradients of weights: a schedule may run it later."""
    inner_forward: float = 0.0
    inner_backward: float = 0.0
    """Communication inside the blocks."""
    gather_each: float = 0.0
    reduce_each: float = 0.0
    """Exposed in every microbatch."""
    gather_once: float = 0.0
    """Before the first forward of a step: parameters still to be gathered."""
    reduce_once: float = 0.0
    """After the last backward of a step: gradients still to be reduced. The last message does not wait for it."""
    transfer: float = 0.0
    """From this stage to the next, and of the gradient back. Free where both share a coordinate."""

    @property
    def forward_seconds(self) -> float:
        return self.forward + self.inner_forward + self.gather_each

    @property
    def backward_seconds(self) -> float:
        return self.backward + self.recompute + self.inner_backward + self.reduce_each

    def of(self, kind: ActionKind) -> float:
        """Seconds of one unit of work; both halves of a backward are as long as the whole."""
        if kind == "forward":
            return self.forward_seconds
        backward = self.backward_seconds
        weights = min(self.weights, backward)
        return {"backward": backward, "backward_inputs": backward - weights, "backward_weights": weights}[kind]


class Timing(NamedTuple):
    """By coordinate: start and end of every action, seconds of own work, seconds exposed, and when its work is over."""

    spans: list[list[tuple[float, float]]]
    busy: list[float]
    exposed: list[float]
    ends: list[float]


class Rule(NamedTuple):
    """What all actions of one kind and stage have in common. Slots are those of microbatch 0."""

    need: int
    asks_ahead: bool
    held_by_receive: float
    seconds: float
    extra_after: float
    slot: int
    link: int
    wire: float
    held_by_send: float


def time_order(order: Order, stages: Sequence[StageSeconds], transfers: Transfers) -> Timing:
    """Play an order of work; `stages` has one entry a stage."""
    rules = MessageRules(order, stages, transfers)
    rows = [rules.row(coordinate) for coordinate in range(len(order))]
    machine = Machine(rows, rules.num_microbatches, len(stages))
    machine.run()
    busy = [sum(rule.seconds + rule.extra_after for rule, _ in row) for row in rows]
    return Timing(machine.spans, busy, machine.exposed, machine.clock)


class MessageRules:
    """Looks up where each action's message comes from and goes to.

    stages: values like StageSeconds; the seconds of many cuts may stand in place of numbers (searching/cuts/played_together.py)."""

    def __init__(self, order: Order, stages: Sequence[Any], transfers: Transfers) -> None:
        self.order = order
        self.stages = stages
        self.transfers = transfers
        self.num_microbatches = 1 + max(action.microbatch for row in order for action in row)
        self.homes = {action.stage: coordinate for coordinate, row in enumerate(order) for action in row}

    def row(self, coordinate: int) -> list[tuple[Rule, int]]:
        """The rule and microbatch of every action of one coordinate."""
        actions = self.order[coordinate]
        rules = {key: self._rule(*key) for key in {(action.kind, action.stage) for action in actions}}
        row = [(rules[action.kind, action.stage], action.microbatch) for action in actions]
        if self.transfers == "requested":
            row = [_asking(*pair) for pair in zip(row, (None, *actions), actions, strict=False)]
        for stage in {stage for _, stage in rules}:
            places = [place for place, action in enumerate(actions) if action.stage == stage]
            first, last = places[0], places[-1]  # a stage begins with a forward and ends with a backward
            rule, microbatch = row[first]
            row[first] = rule._replace(seconds=rule.seconds + self.stages[stage].gather_once), microbatch
            rule, microbatch = row[last]
            row[last] = rule._replace(extra_after=rule.extra_after + self.stages[stage].reduce_once), microbatch
        return row

    def _rule(self, kind: ActionKind, stage: int) -> Rule:
        num_stages, here = len(self.stages), self.homes[stage]
        way = 1 if kind == "forward" else -1
        is_alone = kind == "backward_weights"
        maker = None if is_alone or not 0 <= stage - way < num_stages else stage - way
        taker = None if is_alone or not 0 <= stage + way < num_stages else stage + way
        gradients = 0 if kind == "forward" else num_stages
        taken, sent = self._transfer(stage, maker), self._transfer(stage, taker)
        waits = self.transfers != "asynchronous"
        return Rule(
            need=self.num_microbatches * (2 * num_stages if maker is None else gradients + maker),
            asks_ahead=False,
            held_by_receive=taken if waits else 0.0,
            seconds=self.stages[stage].of(kind),
            extra_after=0.0,
            slot=self.num_microbatches * (2 * num_stages + 1 if taker is None else gradients + stage),
            link=here * len(self.order) + (here if taker is None else self.homes[taker]),
            wire=0.0 if waits else sent,
            held_by_send=sent if self.transfers == "blocking" else 0.0,
        )

    def _transfer(self, stage: int, other: int | None) -> Any:
        if other is None or self.homes[other] == self.homes[stage]:
            return 0.0
        return self.stages[min(stage, other)].transfer


def _asking(entry: tuple[Rule, int], before: Action | None, action: Action) -> tuple[Rule, int]:
    """Whether the taker can ask while it does the action before: it must know what will come."""
    rule, microbatch = entry
    is_first = action.kind == "forward" and microbatch == 0
    is_of_before = before == Action("forward", action.stage, microbatch)
    return rule._replace(asks_ahead=not (before is None or is_first or is_of_before)), microbatch


class Machine:
    """Coordinates, links and slots while an order is played."""

    def __init__(self, rows: list[list[tuple[Rule, int]]], num_microbatches: int, num_stages: int) -> None:
        self.rows = rows
        num_slots = 2 * num_stages * num_microbatches
        self.made = [inf] * num_slots + [0.0] * (2 * num_microbatches)
        self.arrived = self.made.copy()
        self.link_free = [0.0] * len(rows) ** 2
        self.waiting: dict[int, int] = {}
        """The coordinate that waits for a slot."""
        self.spans: list[list[tuple[float, float]]] = [[] for _ in rows]
        self.clock = [0.0] * len(rows)
        self.free_at = [0.0] * len(rows)
        self.exposed = [0.0] * len(rows)

    def run(self) -> None:
        ready = list(range(len(self.rows)))
        while ready:
            ready += self.advance(ready.pop())
        for coordinate, (row, spans) in enumerate(zip(self.rows, self.spans, strict=True)):
            if len(spans) < len(row):
                raise ScheduleError(
                    f"deadlock: coordinate {coordinate} stops after {len(spans)} of {len(row)} actions: "
                    "make a Schedule of the order, and `check` names who waits for whom"
                )

    def advance(self, coordinate: int) -> list[int]:
        """Run one coordinate as far as it goes; who can go on because of it."""
        made, arrived, link_free, waiting = self.made, self.arrived, self.link_free, self.waiting
        clock, free_at, exposed = self.clock[coordinate], self.free_at[coordinate], self.exposed[coordinate]
        row, spans, woken = self.rows[coordinate], self.spans[coordinate], []
        for place in range(len(spans), len(row)):
            rule, microbatch = row[place]
            need, asks_ahead, held_by_receive, seconds, extra_after, slot, link, wire, held_by_send = rule
            need += microbatch
            if made[need] == inf:
                waiting[need] = coordinate
                break
            # comparisons, not max(): the loop is the cost of a play, and max() makes it half as slow again
            begun = made[need] if made[need] > clock else clock
            left = begun
            if asks_ahead:
                left = made[need] if made[need] > spans[-1][0] else spans[-1][0]
            start = left + held_by_receive if left + held_by_receive > free_at else free_at
            start = arrived[need] if arrived[need] > start else start
            exposed += start - begun
            end = start + seconds
            spans.append((start, end))
            slot += microbatch
            made[slot] = end
            leaves = link_free[link] if link_free[link] > end else end
            arrived[slot] = link_free[link] = leaves + wire
            clock = end + extra_after
            free_at = end + held_by_send if held_by_send > extra_after else clock
            if slot in waiting:
                woken.append(waiting.pop(slot))
        self.clock[coordinate], self.free_at[coordinate], self.exposed[coordinate] = clock, free_at, exposed
        return woken
