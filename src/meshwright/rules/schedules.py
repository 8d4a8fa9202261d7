"""The schedule a plan names: its words (core/pipeline/kinds.py) as actions, with transfers and updates."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache

from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.kinds import ScheduleKind, check_virtual, kind_of, placement_of
from meshwright.core.pipeline.placement import Placement, stage_at
from meshwright.core.pipeline.schedule import Action, ActionKind, Order, Schedule
from meshwright.rules.transfers import with_transfers

MEANINGS: dict[str, ActionKind] = {"F": "forward", "B": "backward", "I": "backward_inputs"}


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
    """Words → actions: each word counts its own microbatches, whole backwards and those for inputs together."""
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
