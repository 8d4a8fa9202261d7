"""Pipelines over a transport whose sends end only when the other side has asked: NCCL above its buffering.

Each rank runs its row. Posting never waits; a piece of work waits for the messages it needs. What was posted lies in queues, and
a queue goes on to its next entry when its head is done: a send and its receive are done when both are heads of their queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import pytest
from hypothesis import given
from strategies import quick, schedule_sizes

from meshwright.core.pipeline.schedule import COMPUTE_KINDS, Action, Schedule
from meshwright.rules.schedules import make_schedule, receipts, receives_ahead

Queue = Callable[[int, int], Hashable]
"""(the coordinate a message comes from, the one it goes to) → the queue it lies in, on each side."""


def by_direction(source: int, target: int) -> Hashable:
    """One queue for all that goes down, one for all that goes up: a group of each direction, whatever the pair."""
    return source < target


def by_link(source: int, target: int) -> Hashable:
    return (source, target)


def in_one(source: int, target: int) -> Hashable:
    return (min(source, target), max(source, target))


class Transport:
    def __init__(self, schedule: Schedule, queue: Queue) -> None:
        self.schedule, self.queue = schedule, queue
        self.queues: list[dict[Hashable, deque[tuple[str, Action]]]] = [{} for _ in schedule.actions]
        self.arrived: set[Action] = set()

    def post(self, coordinate: int, kind: str, receive: Action) -> None:
        source, target = self.ends(receive)
        own = self.queues[coordinate].setdefault(self.queue(source, target), deque())
        own.append((kind, receive))

    def ends(self, receive: Action) -> tuple[int, int]:
        maker = receive.stage - 1 if receive.kind == "receive_forward" else receive.stage + 1
        return self.schedule.coordinate_of(maker), self.schedule.coordinate_of(receive.stage)

    def move(self) -> bool:
        """Everything whose send and receive are both at the head."""
        moved = False
        for number, own in enumerate(self.queues):
            for waiting in own.values():
                while waiting and waiting[0][0] == "send" and self._is_awaited(waiting[0][1]):
                    receive = waiting.popleft()[1]
                    source, target = self.ends(receive)
                    assert source == number
                    self.queues[target][self.queue(source, target)].popleft()
                    self.arrived.add(receive)
                    moved = True
        return moved

    def _is_awaited(self, receive: Action) -> bool:
        source, target = self.ends(receive)
        other = self.queues[target].get(self.queue(source, target))
        return bool(other) and other[0] == ("receive", receive)


def receive_of(send: Action) -> Action:
    if send.kind == "send_forward":
        return Action("receive_forward", send.stage + 1, send.microbatch)
    return Action("receive_backward", send.stage - 1, send.microbatch)


class Rank:
    """What the runtime does with a row: receives are posted one piece of work ahead, those of gradients not before what they
    are gradients of is there."""

    def __init__(self, schedule: Schedule, coordinate: int, transport: Transport) -> None:
        self.coordinate, self.transport = coordinate, transport
        self.row = schedule.actions[coordinate]
        self.ahead = receives_ahead(self.row)
        self.place, self.posted, self.done = 0, set[Action](), set[Action]()
        self.looked = -1

    def advance(self) -> bool:
        moved = False
        while self.place < len(self.row) and self._run(self.row[self.place]):
            self.done.add(self.row[self.place])
            self.place += 1
            moved = True
        return moved

    def _run(self, action: Action) -> bool:
        if action.kind in COMPUTE_KINDS and self.looked < self.place:
            self.looked = self.place
            for receive in self.ahead.get(self.place, ()):
                if not self._is_known(receive):
                    break
                self._post(receive)
        if action.kind.startswith("receive"):
            self._post(action)
            return action in self.transport.arrived
        if action.kind.startswith("send"):
            self.transport.post(self.coordinate, "send", receive_of(action))
        return True

    def _is_known(self, receive: Action) -> bool:
        forward = Action("forward", receive.stage, receive.microbatch)
        return receive.kind == "receive_forward" or forward in self.done

    def _post(self, receive: Action) -> None:
        if receive not in self.posted:
            self.posted.add(receive)
            self.transport.post(self.coordinate, "receive", receive)


def reaches_its_end(schedule: Schedule, queue: Queue) -> bool:
    transport = Transport(schedule, queue)
    ranks = [Rank(schedule, number, transport) for number in range(schedule.num_coordinates)]
    while any([transport.move(), *(rank.advance() for rank in ranks)]):
        pass
    return all(rank.place == len(rank.row) for rank in ranks) and not any(
        waiting for own in transport.queues for waiting in own.values()
    )


@quick
@given(schedule_sizes())
def test_every_schedule_ends_with_a_queue_for_each_link(sizes: tuple[object, ...]) -> None:
    assert reaches_its_end(make_schedule(*sizes), by_link)  # type: ignore[arg-type]


def test_fewer_queues_wait_for_themselves() -> None:
    assert not reaches_its_end(make_schedule("1f1b", 2, 4, 1), in_one)
    assert not reaches_its_end(make_schedule("zbv", 4, 8, 2), by_direction)


@pytest.mark.parametrize("num_coordinates", [2, 4, 8])
def test_sends_are_told_of_while_the_step_goes_on(num_coordinates: int) -> None:
    """Of 64 microbatches, a coordinate of 1F1B does not know of more than the depth of the pipeline whether they arrived."""
    schedule = make_schedule("1f1b", num_coordinates, 64, 1)
    for coordinate in range(num_coordinates):
        told, under_way, most = receipts(schedule.actions, coordinate), set[Action](), 0
        for action in schedule.actions[coordinate]:
            under_way -= set(told.get(action, ()))
            under_way |= {action} if action.kind.startswith("send") else set()
            most = max(most, len(under_way))
        assert most <= 2 * num_coordinates


@quick
@given(schedule_sizes())
def test_nothing_is_told_of_that_has_not_arrived(sizes: tuple[object, ...]) -> None:
    schedule = make_schedule(*sizes)  # type: ignore[arg-type]
    for coordinate, row in enumerate(schedule.actions):
        told = receipts(schedule.actions, coordinate)
        for place, action in enumerate(row):
            for send in told.get(action, ()):
                assert send in row[:place]
