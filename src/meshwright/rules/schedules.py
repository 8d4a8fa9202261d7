"""The schedules a plan can name, each as the order of work of one coordinate.

An order is written in words. `F0` is the next forward of the coordinate's stage of turn 0, `B0` its next whole backward, `I0`
its next backward for inputs; `W` is the oldest backward for weights that is owed. Every word counts microbatches from 0; one
past the last is left out, and what is owed at the end is done there.

p coordinates, c this one, m microbatches, v stages a coordinate; `X·n` is X n times:

    gpipe         F·m B·m                                                                          -> _gpipe
    1f1b          F·w (F B)·(m-w) B·w            w = p-1-c                                         -> _one_forward_one_backward
                  at most p - c microbatches in flight
    interleaved   1f1b over all turns: rounds of g microbatches go through turn 0, turn 1, …       -> _interleaved
                  w = 2 (p-1-c) + (v-1) g, at most w + 1 in flight; g = p where p divides m, else the rounds are
                  max(1, ⌊m/p⌋) and as even as they can be, so that none is shorter than the pipeline
    zb            F·w (F I)·c (F I W)·(m-c) W·c  w = p-1-c, ZB-H1: weights lag c behind            -> _zero_bubble
                  at most p in flight on every coordinate
    zbv           F0·(2(p-c)-1) (F1 F0)·c (F1 I1 W)·(p-c) (F0 I0 W F1 I1 W)·(n-p) (I0 I1)·c        -> _zero_bubble_v
                  (I0 W)·(p-c) W·c               n = max(m, 2p-1)
    dualpipev     F0·2(p-c-1) (F0 F1)·(c+1) (I1 W F1)·(p-c-1) (F0 B1 F1 B0)·(m-2p+c+1)             -> _dualpipe_v
                  (B1 F1 B0)·(p-c-1), then of 2(c+1) backwards of turns 1 and 0 the first half whole and the rest I,
                  (W I0)·(p-c-1) W·(c+1)         needs m ≥ 2p

Sources: GPipe (1811.06965), Megatron-LM (2104.04473), zero bubble (2401.10241), DualPipeV (github.com/deepseek-ai/DualPipe).
DualPipeV runs `F0 B1` and `F1 B0` side by side where kernels allow it; here they stand in a row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache

from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.placement import Placement, stage_at
from meshwright.core.pipeline.schedule import Action, ActionKind, Order, Schedule
from meshwright.core.pipeline.schedule_kinds import ScheduleKind, check_virtual, placement_of
from meshwright.rules.transfers import with_transfers

KINDS: dict[str, ActionKind] = {"F": "forward", "B": "backward", "I": "backward_inputs"}


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
    writers: dict[ScheduleKind, Callable[[int, int, int], list[str]]] = {
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": lambda c, p, m: _interleaved(c, p, m, virtual),
        "zb": _zero_bubble,
        "zbv": _zero_bubble_v,
        "dualpipev": _dualpipe_v,
    }
    return tuple(
        _counted(
            writers[kind](c, num_coordinates, num_microbatches),
            _stages(c, num_coordinates, virtual, placement_of(kind)),
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
    if kind == "dualpipev" and num_microbatches < 2 * num_coordinates:
        raise ScheduleError(
            f"schedule 'dualpipev' on {num_coordinates} coordinates needs {2 * num_coordinates} microbatches or more, "
            f"got {num_microbatches}: make microbatches smaller, lower pp, or use zbv"
        )


def _stages(coordinate: int, num_coordinates: int, virtual: int, placement: Placement) -> list[int]:
    """The stages of a coordinate by turn."""
    return [stage_at(coordinate, turn, num_coordinates, placement) for turn in range(virtual)]


def _gpipe(c: int, p: int, m: int) -> list[str]:
    return ["F0"] * m + ["B0"] * m


def _one_forward_one_backward(c: int, p: int, m: int) -> list[str]:
    return _in_turn(["F0"] * m, ["B0"] * m, num_ahead=p - 1 - c)


def _interleaved(c: int, p: int, m: int, v: int) -> list[str]:
    rounds = _rounds(p, m)
    forwards = [f"F{turn}" for size in rounds for turn in range(v) for _ in range(size)]
    backwards = [f"B{turn}" for size in rounds for turn in reversed(range(v)) for _ in range(size)]
    return _in_turn(forwards, backwards, num_ahead=2 * (p - 1 - c) + (v - 1) * rounds[0])


def _rounds(p: int, m: int) -> list[int]:
    """How many microbatches go through all turns together, round by round; the largest first."""
    num_rounds = max(1, m // p)
    size, num_larger = divmod(m, num_rounds)
    return [size + 1] * num_larger + [size] * (num_rounds - num_larger)


def _in_turn(forwards: list[str], backwards: list[str], num_ahead: int) -> list[str]:
    """Some forwards ahead, then one forward and one backward in turn, then the backwards that are left."""
    ahead, rest = forwards[:num_ahead], forwards[num_ahead:]
    pairs = [word for pair in zip(rest, backwards, strict=False) for word in pair]
    return ahead + pairs + backwards[len(rest) :]


def _zero_bubble(c: int, p: int, m: int) -> list[str]:
    lag = min(c, m)
    return ["F0"] * (p - 1 - c) + ["F0", "I0"] * lag + ["F0", "I0", "W"] * (m - lag)


def _zero_bubble_v(c: int, p: int, m: int) -> list[str]:
    warmup = ["F0"] * (2 * (p - c) - 1) + ["F1", "F0"] * c + ["F1", "I1", "W"] * (p - c)
    steady = ["F0", "I0", "W", "F1", "I1", "W"] * (max(m, 2 * p - 1) - p)
    return warmup + steady + ["I0", "I1"] * c + ["I0", "W"] * (p - c)


def _dualpipe_v(c: int, p: int, m: int) -> list[str]:
    below = p - c - 1
    warmup = ["F0"] * (2 * below) + ["F0", "F1"] * (c + 1) + ["I1", "W", "F1"] * below
    steady = ["F0", "B1", "F1", "B0"] * (m - 2 * p + c + 1) + ["B1", "F1", "B0"] * below
    whole = (["B1", "B0"] * (c + 1))[: c + 1]
    split = (["I1", "I0"] * (c + 1))[c + 1 :]
    return warmup + steady + whole + split + ["W", "I0"] * below


def _counted(words: list[str], stages: Sequence[int], num_microbatches: int) -> tuple[Action, ...]:
    """Words → actions: each word counts its own microbatches, whole backwards and those for inputs together."""
    meanings = {word: (KINDS[word[0]], int(word[1:])) for word in set(words) - {"W"}}
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
