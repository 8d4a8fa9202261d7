"""The sends and receives of an order of work.

What a stage makes is sent as soon as it is made. A receive comes just before the work that needs it, and before it the
receives of everything the same link sent earlier: nothing but order tells two messages apart. That holds nobody up: what
was sent earlier has been sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from meshwright.core.pipeline.placement import Placement, coordinate_of
from meshwright.core.pipeline.schedule import COMPUTE_KINDS, Action, ActionKind, Order

SENDS: dict[ActionKind, ActionKind] = {
    "forward": "send_forward", "backward": "send_backward", "backward_inputs": "send_backward",
}  # fmt: skip
RECEIVES: dict[ActionKind, ActionKind] = {
    "forward": "receive_forward", "backward": "receive_backward", "backward_inputs": "receive_backward",
}  # fmt: skip


def with_transfers(order: Order, num_stages: int, placement: Placement) -> tuple[tuple[Action, ...], ...]:
    """Each coordinate's work with its sends and receives."""
    return _Wires(order, num_stages, placement).rows()


class _Wires:
    """What is under way on every link while the receives are laid out."""

    def __init__(self, order: Order, num_stages: int, placement: Placement) -> None:
        self.order = order
        self.homes = [coordinate_of(stage, len(order), placement) for stage in range(num_stages)]
        self.queues: dict[tuple[int, int], deque[Action]] = {}
        for action in (action for row in order for action in row):
            taker = self._taker(action)
            if taker is not None:
                link = self.homes[action.stage], self.homes[taker]
                message = Action(RECEIVES[action.kind], taker, action.microbatch)
                self.queues.setdefault(link, deque()).append(message)

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(self._row(row)) for row in self.order)

    def _row(self, row: tuple[Action, ...]) -> Iterator[Action]:
        received: set[Action] = set()
        for action in row:
            maker = self._maker(action)
            if maker is not None:
                needed = Action(RECEIVES[action.kind], action.stage, action.microbatch)
                queue = self.queues[self.homes[maker], self.homes[action.stage]]
                while needed not in received:
                    received.add(queue[0])
                    yield queue.popleft()
            yield action
            if self._taker(action) is not None:
                yield Action(SENDS[action.kind], action.stage, action.microbatch)

    def _taker(self, action: Action) -> int | None:
        """The stage on another coordinate that takes what this action makes."""
        return self._abroad(action, 1 if action.kind == "forward" else -1)

    def _maker(self, action: Action) -> int | None:
        """The stage on another coordinate that makes what this action takes."""
        return self._abroad(action, -1 if action.kind == "forward" else 1)

    def _abroad(self, action: Action, distance: int) -> int | None:
        other = action.stage + distance
        if action.kind not in SENDS or not 0 <= other < len(self.homes):
            return None
        return None if self.homes[other] == self.homes[action.stage] else other


def receives_ahead(row: tuple[Action, ...]) -> dict[int, tuple[Action, ...]]:
    """Which receives to post before each piece of work: those of the next piece. By the work's place in the row."""
    found: dict[int, tuple[Action, ...]] = {}
    place = None
    for number, action in enumerate(row):
        if action.kind in COMPUTE_KINDS:
            place = number
        elif action.kind in RECEIVES.values() and place is not None:
            found[place] = (*found.get(place, ()), action)
    return found


def receipts(rows: tuple[tuple[Action, ...], ...], coordinate: int) -> dict[Action, tuple[Action, ...]]:
    """Which sends of a coordinate have arrived when one of its receives has: those that the other side had taken before it sent
    this message. Each send stands at the first receive that tells."""
    homes = {action.stage: number for number, row in enumerate(rows) for action in row}
    own = [action for action in rows[coordinate] if action.kind in RECEIVES.values()]
    sent = {_receive_of(action): action for action in rows[coordinate] if action.kind in SENDS.values()}
    told: set[Action] = set()
    found: dict[Action, tuple[Action, ...]] = {}
    for receive in own:
        send = _send_of(receive)
        row = rows[homes[send.stage]]
        taken = [sent[action] for action in row[: row.index(send)] if action in sent]
        new = tuple(action for action in taken if action not in told)
        told.update(new)
        if new:
            found[receive] = new
    return found


def _receive_of(send: Action) -> Action:
    forward = send.kind == "send_forward"
    return Action(
        "receive_forward" if forward else "receive_backward", send.stage + (1 if forward else -1), send.microbatch
    )


def _send_of(receive: Action) -> Action:
    forward = receive.kind == "receive_forward"
    return Action(
        "send_forward" if forward else "send_backward", receive.stage - (1 if forward else -1), receive.microbatch
    )
