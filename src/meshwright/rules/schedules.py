"""The schedule a plan names: its words (core/pipeline/kinds.py) as actions, with transfers and updates.

What a stage makes is sent as soon as it is made. A receive comes just before the work that needs it, and before it the
receives of everything the same link sent earlier: nothing but order tells two messages apart. That holds nobody up: what
was sent earlier has been sent.                                                                 -> with_transfers
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.kinds import ScheduleKind, check_virtual, kind_of, placement_of
from meshwright.core.pipeline.placement import Placement, coordinate_of, stage_at
from meshwright.core.pipeline.schedule import COMPUTE_KINDS, Action, ActionKind, Order, Schedule

MEANINGS: dict[str, ActionKind] = {"F": "forward", "B": "backward", "I": "backward_inputs"}
SENDS: dict[ActionKind, ActionKind] = {
    "forward": "send_forward", "backward": "send_backward", "backward_inputs": "send_backward",
}  # fmt: skip
OTHER_SIDE: dict[ActionKind, tuple[ActionKind, int]] = {
    "send_forward": ("receive_forward", 1), "send_backward": ("receive_backward", -1),
    "receive_forward": ("send_forward", -1), "receive_backward": ("send_backward", 1),
}  # fmt: skip
"""A send or receive → what the other side does, and how many stages on."""
RECEIVES: tuple[ActionKind, ActionKind] = ("receive_forward", "receive_backward")


def make_schedule(kind: ScheduleKind, num_coordinates: int, num_microbatches: int, virtual: int = 1) -> Schedule:
    """The schedule a plan names: its work, transfers, and the update of every stage."""
    order = make_order(kind, num_coordinates, num_microbatches, virtual)
    placement = placement_of(kind)
    rows = with_transfers(order, num_coordinates * virtual, placement)
    return Schedule(
        kind=kind,
        num_microbatches=num_microbatches,
        num_stages=num_coordinates * virtual,
        placement=placement,
        actions=tuple(
            (*row, *(Action("update", stage, 0) for stage in _stages(c, num_coordinates, virtual, placement)))
            for c, row in enumerate(rows)
        ),
    )


@lru_cache(maxsize=64)  # a search asks for the same few again and again
def make_order(kind: ScheduleKind, num_coordinates: int, num_microbatches: int, virtual: int = 1) -> Order:
    """The work of the schedule a plan names, without transfers and updates."""
    _check_sizes(kind, num_coordinates, num_microbatches, virtual)
    words, stages = kind_of(kind).order, placement_of(kind)
    return tuple(
        _counted(
            words(c, num_coordinates, num_microbatches, virtual),
            _stages(c, num_coordinates, virtual, stages),
            num_microbatches,
        )
        for c in range(num_coordinates)
    )


def _check_sizes(kind: ScheduleKind, num_coordinates: int, num_microbatches: int, virtual: int) -> None:
    if num_coordinates < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"a schedule needs at least one stage and one microbatch, got {num_coordinates} and {num_microbatches}"
        )
    check_virtual(kind, virtual, ScheduleError)
    least = kind_of(kind).least_microbatches(num_coordinates)
    if num_microbatches < least:
        raise ScheduleError(
            f"schedule '{kind}' on {num_coordinates} coordinates needs {least} microbatches or more, got {num_microbatches}: "
            "make microbatches smaller, lower pp, or use zbv"
        )


def _stages(coordinate: int, num_coordinates: int, virtual: int, placement: Placement) -> list[int]:
    """The stages of a coordinate by turn."""
    return [stage_at(coordinate, turn, num_coordinates, placement) for turn in range(virtual)]


def _counted(words: list[str], stages: Sequence[int], num_microbatches: int) -> tuple[Action, ...]:
    """Words → actions: each word counts its own microbatches; whole backwards and backwards for inputs count together."""
    meanings = {word: (MEANINGS[word[0]], int(word[1:])) for word in set(words) - {"W"}}
    counts = Counter[tuple[bool, int]]()
    owed: deque[Action] = deque()
    row: list[Action] = []
    for word in words:
        if word == "W":
            row += [owed.popleft()] if owed else []
            continue
        kind, turn = meanings[word]
        microbatch = counts[kind == "forward", turn]
        if microbatch < num_microbatches:
            counts[kind == "forward", turn] += 1
            row.append(Action(kind, stages[turn], microbatch))
            if kind == "backward_inputs":
                owed.append(Action("backward_weights", stages[turn], microbatch))
    return (*row, *owed)


def other_side(action: Action) -> Action:
    """The receive of a send; the send of a receive."""
    kind, distance = OTHER_SIDE[action.kind]
    return Action(kind, action.stage + distance, action.microbatch)


def with_transfers(order: Order, num_stages: int, placement: Placement) -> tuple[tuple[Action, ...], ...]:
    """Each coordinate's work with its sends and receives."""
    homes = [coordinate_of(stage, len(order), placement) for stage in range(num_stages)]
    under_way: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    """On every link, the receives that are still to come."""

    def goes_abroad(action: Action, distance: int) -> bool:
        """Whether another coordinate takes what an action makes (distance 1), or makes what it takes (-1)."""
        other = action.stage + (distance if action.kind == "forward" else -distance)
        return action.kind in SENDS and 0 <= other < num_stages and homes[other] != homes[action.stage]

    def laid(row: tuple[Action, ...]) -> Iterator[Action]:
        received: set[Action] = set()
        for action in row:
            if goes_abroad(action, -1):
                needed = Action(RECEIVES[action.kind != "forward"], action.stage, action.microbatch)
                queue = under_way[homes[other_side(needed).stage], homes[action.stage]]
                while needed not in received:
                    received.add(queue[0])
                    yield queue.popleft()
            yield action
            if goes_abroad(action, 1):
                yield Action(SENDS[action.kind], action.stage, action.microbatch)

    for action in chain.from_iterable(order):
        if goes_abroad(action, 1):
            message = other_side(Action(SENDS[action.kind], action.stage, action.microbatch))
            under_way[homes[action.stage], homes[message.stage]].append(message)
    return tuple(tuple(laid(row)) for row in order)


def receives_ahead(row: tuple[Action, ...]) -> dict[int, tuple[Action, ...]]:
    """The receives to post before each piece of work, by its place in the row: the receives of the next piece."""
    found: dict[int, tuple[Action, ...]] = {}
    place = None
    for number, action in enumerate(row):
        if action.kind in COMPUTE_KINDS:
            place = number
        elif action.kind in RECEIVES and place is not None:
            found[place] = (*found.get(place, ()), action)
    return found


def receipts(rows: tuple[tuple[Action, ...], ...], coordinate: int) -> dict[Action, tuple[Action, ...]]:
    """The sends of a coordinate that have arrived when one of its receives has: the sends that the other side had received before
    it sent this message. Each send stands at the first receive that proves its arrival."""
    homes = {action.stage: number for number, row in enumerate(rows) for action in row}
    own = [action for action in rows[coordinate] if action.kind in RECEIVES]
    sent = {other_side(action): action for action in rows[coordinate] if action.kind in SENDS.values()}
    told: set[Action] = set()
    found: dict[Action, tuple[Action, ...]] = {}
    for receive in own:
        send = other_side(receive)
        row = rows[homes[send.stage]]
        taken = [sent[action] for action in row[: row.index(send)] if action in sent]
        new = tuple(action for action in taken if action not in told)
        told.update(new)
        if new:
            found[receive] = new
    return found
