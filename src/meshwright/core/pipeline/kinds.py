"""The kinds of schedule: everything that planning, costing and running ask about each, in one value a kind.

An order of work is written in words. `F0` is the next forward of the coordinate's stage of turn 0, `B0` its next whole backward,
`I0` its next backward for inputs; `W` is the oldest backward for weights that is owed. Every word counts microbatches from 0; one
past the last is left out, and what is owed at the end is done there.

p coordinates, c this one, m microbatches, v stages a coordinate; `X·n` is X n times:

    gpipe         F·m B·m                                                                          -> _gpipe
    1f1b          F·w (F B)·(m-w) B·w            w = p-1-c                                         -> _one_forward_one_backward
                  at most p - c microbatches in flight
    interleaved   1f1b over all turns: rounds of g microbatches go through turn 0, turn 1, …       -> _interleaved
                  w = 2 (p-1-c) + (v-1) g, at most w + 1 in flight; g = p where p divides m, else the rounds are
                  max(1, ⌊m/p⌋) and as even as they can be, so that none is shorter than the pipeline
    breadth-first F0·m F1·m … then the backwards of the last turn, …: GPipe over all turns         -> _breadth_first
                  all m microbatches of every stage in flight; a stage's parameters are used once forward, once backward
    zb            F·w (F I)·c (F I W)·(m-c) W·c  w = p-1-c, ZB-H1: weights lag c behind            -> _zero_bubble
                  at most p in flight on every coordinate
    zbv           F0·(2(p-c)-1) (F1 F0)·c (F1 I1 W)·(p-c) (F0 I0 W F1 I1 W)·(n-p) (I0 I1)·c        -> _zero_bubble_v
                  (I0 W)·(p-c) W·c               n = max(m, 2p-1)
    dualpipev     F0·2(p-c-1) (F0 F1)·(c+1) (I1 W F1)·(p-c-1) (F0 B1 F1 B0)·(m-2p+c+1)             -> _dualpipe_v
                  (B1 F1 B0)·(p-c-1), then of 2(c+1) backwards of turns 1 and 0 the first half whole and the rest I,
                  (W I0)·(p-c-1) W·(c+1)         needs m ≥ 2p

Sources: GPipe (1811.06965), Megatron-LM (2104.04473), breadth-first (2211.05953), zero bubble (2401.10241),
DualPipeV (github.com/deepseek-ai/DualPipe).
DualPipeV runs `F0 B1` and `F1 B0` side by side where kernels allow it; here they stand in a row.

Lower bounds. T_f and T_b are the seconds of a microbatch through all stages, T their sum; stage i takes t_i = f_i + b_i. The step
of a schedule with one stage a coordinate is at least `through` + the largest `stage_weight`; the least largest weight over all cuts
follows from the weights of stages of equal work (searching/bounds/load_balance.py):

    gpipe         all forwards, then all backwards        T + (m-1) t_i
    1f1b          stage i has begun w_i = min(p-1-i, m) forwards when its first backward can start, and then does the rest:
                  T + (m-1) b_i + max(0, m-w_i-1) f_i
    zb            T_f + m t_i - (p-i) f_i
    several turns coordinate i waits for i chunks forward, and i chunks backward follow its last: m T/p + the mean of these over
                  all coordinates, (p-1)/2 · least chunk; where backward is in halves, the forwards alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from meshwright.core.errors import nearest
from meshwright.core.pipeline.placement import Placement

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "breadth-first", "zb", "zbv", "dualpipev"]

Words = list[str]
Cut = Sequence[tuple[float, float]]
"""Seconds of forward and backward of each stage."""
UNBOUNDED = 1 << 30
"""Stages on a coordinate, where the kind runs any number."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of schedule. No field has a default: a kind that lacks one fails when this package is loaded."""

    title: str
    """Its name in words."""
    placement: Placement
    """The placement of stages on coordinates."""
    turns: tuple[int, int]
    """The fewest and the most stages on a coordinate."""
    splits_backward: bool
    """Whether backward comes in halves: gradients of inputs, and later gradients of weights."""
    is_searched: bool
    """Whether a search proposes it where the request leaves the schedule open."""
    keeps_all: bool
    """Whether all microbatches are in flight before the first backward, however many there are."""
    order: Callable[[int, int, int, int], Words]
    """(c, p, m, v) → the work of a coordinate, in words."""
    least_microbatches: Callable[[int], int]
    """p → the fewest microbatches it runs."""
    filling: Callable[[int], int]
    """p → how many microbatches have begun when the first one's backward begins; not asked of kinds that keep all."""
    round_size: Callable[[int, int], int]
    """(p, m) → microbatches in a round of a full pipeline, after which the order repeats; 0 where rounds are not alike."""
    in_flight: Callable[[int, int, int, int], int]
    """(c, p, m, v) → the most microbatches that a coordinate keeps, counted for each of its stages."""
    idle: Callable[[float, float, float, int], float]
    """Seconds of forward, backward for inputs and for weights of an even stage's microbatch, v → seconds of bubble for each
    coordinate but one."""
    stage_weight: Callable[[int, int, int, Any, Any], Any]
    """(stage, p, m, forward, backward) → seconds of a step that stage adds to `through`, where it is the heaviest; numbers or
    arrays."""
    cut_seconds: Callable[[Cut, int], float]
    """(stages, m) → seconds that no step with these stages beats; 0 where no more is known than the work of each."""

    def runs(self, virtual: int) -> bool:
        return self.turns[0] <= virtual <= self.turns[1]

    @property
    def has_turns(self) -> bool:
        """Whether it runs several stages on a coordinate."""
        return self.turns[1] > 1


def kind_of(name: ScheduleKind) -> Kind:
    return KINDS[name]


def placement_of(name: ScheduleKind) -> Placement:
    return KINDS[name].placement


def check_virtual(name: ScheduleKind, virtual: int, error: type[ValueError]) -> None:
    """Refuses a number of stages a coordinate that the schedule does not run."""
    kind = KINDS[name]
    if kind.runs(virtual):
        return
    fewest, most = kind.turns
    if not kind.has_turns:
        several = [other for other, found in KINDS.items() if found.has_turns]
        raise error(
            f"schedule '{name}' runs one stage per coordinate, but virtual={virtual}: "
            f"set virtual to 1, or use one of {', '.join(several)}"
        )
    if fewest == most:
        raise error(f"schedule '{name}' runs two stages per coordinate, but virtual={virtual}: set virtual to {most}")
    raise error(
        f"schedule '{name}' runs several stages per coordinate, but virtual={virtual}: "
        f"set virtual to {fewest} or more, or use 1f1b"
    )


@lru_cache(maxsize=4096)
def in_flight(name: ScheduleKind, pp: int, num_microbatches: int, virtual: int) -> tuple[int, ...]:
    """How many stages' worth of microbatches each coordinate keeps at most."""
    kind = KINDS[name]
    return tuple(kind.in_flight(coordinate, pp, num_microbatches, virtual) for coordinate in range(pp))


# ------------------------------------------------------------------------------------------------ orders


def _gpipe(c: int, p: int, m: int, v: int) -> Words:
    return ["F0"] * m + ["B0"] * m


def _one_forward_one_backward(c: int, p: int, m: int, v: int) -> Words:
    return _in_turn(["F0"] * m, ["B0"] * m, num_ahead=p - 1 - c)


def _interleaved(c: int, p: int, m: int, v: int) -> Words:
    rounds = _rounds(p, m)
    forwards = [f"F{turn}" for size in rounds for turn in range(v) for _ in range(size)]
    backwards = [f"B{turn}" for size in rounds for turn in reversed(range(v)) for _ in range(size)]
    return _in_turn(forwards, backwards, num_ahead=2 * (p - 1 - c) + (v - 1) * rounds[0])


def _rounds(p: int, m: int) -> list[int]:
    """How many microbatches go through all turns together, round by round; the largest first."""
    num_rounds = max(1, m // p)
    size, num_larger = divmod(m, num_rounds)
    return [size + 1] * num_larger + [size] * (num_rounds - num_larger)


def _in_turn(forwards: Words, backwards: Words, num_ahead: int) -> Words:
    """Some forwards ahead, then one forward and one backward in turn, then the backwards that are left."""
    ahead, rest = forwards[:num_ahead], forwards[num_ahead:]
    pairs = [word for pair in zip(rest, backwards, strict=False) for word in pair]
    return ahead + pairs + backwards[len(rest) :]


def _breadth_first(c: int, p: int, m: int, v: int) -> Words:
    return [f"F{turn}" for turn in range(v) for _ in range(m)] + [
        f"B{turn}" for turn in reversed(range(v)) for _ in range(m)
    ]


def _zero_bubble(c: int, p: int, m: int, v: int) -> Words:
    lag = min(c, m)
    return ["F0"] * (p - 1 - c) + ["F0", "I0"] * lag + ["F0", "I0", "W"] * (m - lag)


def _zero_bubble_v(c: int, p: int, m: int, v: int) -> Words:
    warmup = ["F0"] * (2 * (p - c) - 1) + ["F1", "F0"] * c + ["F1", "I1", "W"] * (p - c)
    steady = ["F0", "I0", "W", "F1", "I1", "W"] * (max(m, 2 * p - 1) - p)
    return warmup + steady + ["I0", "I1"] * c + ["I0", "W"] * (p - c)


def _dualpipe_v(c: int, p: int, m: int, v: int) -> Words:
    below = p - c - 1
    warmup = ["F0"] * (2 * below) + ["F0", "F1"] * (c + 1) + ["I1", "W", "F1"] * below
    steady = ["F0", "B1", "F1", "B0"] * (m - 2 * p + c + 1) + ["B1", "F1", "B0"] * below
    whole = (["B1", "B0"] * (c + 1))[: c + 1]
    split = (["I1", "I0"] * (c + 1))[c + 1 :]
    return warmup + steady + whole + split + ["W", "I0"] * below


# ------------------------------------------------------------------------------------------------ what several kinds share


def one_microbatch(p: int) -> int:
    return 1


def one_a_coordinate(p: int) -> int:
    return p


def one_by_one(p: int, m: int) -> int:
    return 1


def counted(order: Callable[[int, int, int, int], Words]) -> Callable[[int, int, int, int], int]:
    """Microbatches in flight by counting the words of a pipeline that is full: with more, as many are in flight."""

    def most(c: int, p: int, m: int, v: int) -> int:
        return most_in_flight(order(c, p, min(m, 3 * p), v), min(m, 3 * p))

    return most


def most_in_flight(words: Words, num_microbatches: int) -> int:
    """A microbatch is kept from its forward until its gradients of weights are made."""
    begun: dict[str, int] = {}
    held = most = owed = 0
    for word in words:
        if word == "W":
            held, owed = (held - 1, owed - 1) if owed else (held, owed)
            continue
        is_forward, turn = word[0] == "F", word[1:]
        key = f"{is_forward} {turn}"
        if begun.setdefault(key, 0) == num_microbatches:
            continue
        begun[key] += 1
        held += 1 if is_forward else -1 if word[0] == "B" else 0
        owed += word[0] == "I"
        most = max(most, held)
    return most


def all_of_them(c: int, p: int, m: int, v: int) -> int:
    return m * v


def whole_idle(forward: float, inputs: float, weights: float, v: int) -> float:
    """A coordinate waits for the forwards of the stages before it, and for the backwards of the stages behind it."""
    return (forward + inputs + weights) / v


def half_idle(forward: float, inputs: float, weights: float, v: int) -> float:
    return max(forward, inputs, weights) / v


def _split_idle(forward: float, inputs: float, weights: float, v: int) -> float:
    return max(forward + inputs - weights, forward, inputs)


def even_weight(stage: int, p: int, m: int, forward: Any, backward: Any) -> Any:
    return (m - 1 or 1) * (forward + backward)


def _one_f_one_b_weight(stage: int, p: int, m: int, forward: Any, backward: Any) -> Any:
    return (m - 1) * backward + max(0, m - p + stage) * forward


def _split_weight(stage: int, p: int, m: int, forward: Any, backward: Any) -> Any:
    return m * (forward + backward) - (p - stage) * forward


def nothing_more(stages: Cut, m: int) -> float:
    return 0.0


def _gpipe_seconds(stages: Cut, m: int) -> float:
    slowest = max(forward for forward, _ in stages) + max(backward for _, backward in stages)
    return sum(forward + backward for forward, backward in stages) + (m - 1) * slowest


def _one_f_one_b_seconds(stages: Cut, m: int) -> float:
    rests: list[float] = [_one_f_one_b_weight(i, len(stages), m, *seconds) for i, seconds in enumerate(stages)]
    return sum(forward + backward for forward, backward in stages) + max(rests)


# ------------------------------------------------------------------------------------------------ the table

KINDS: dict[ScheduleKind, Kind] = {
    "1f1b": Kind(
        title="1F1B", placement="loop", turns=(1, 1), splits_backward=False, is_searched=True, keeps_all=False,
        order=_one_forward_one_backward, least_microbatches=one_microbatch, filling=one_a_coordinate, round_size=one_by_one,
        in_flight=lambda c, p, m, v: min(m, p - c),
        idle=whole_idle, stage_weight=_one_f_one_b_weight, cut_seconds=_one_f_one_b_seconds,
    ),
    "gpipe": Kind(
        title="GPipe", placement="loop", turns=(1, 1), splits_backward=False, is_searched=True, keeps_all=True,
        order=_gpipe, least_microbatches=one_microbatch, filling=one_a_coordinate, round_size=one_by_one,
        in_flight=all_of_them,
        idle=whole_idle, stage_weight=even_weight, cut_seconds=_gpipe_seconds,
    ),
    "zb": Kind(
        title="zero bubble (ZB-H1)", placement="loop", turns=(1, 1), splits_backward=True, is_searched=True, keeps_all=False,
        order=_zero_bubble, least_microbatches=one_microbatch, filling=one_a_coordinate, round_size=one_by_one,
        in_flight=lambda c, p, m, v: min(m, p),
        idle=_split_idle, stage_weight=_split_weight, cut_seconds=nothing_more,
    ),
    "zbv": Kind(
        title="zero bubble in a V (ZB-V)", placement="v", turns=(2, 2), splits_backward=True, is_searched=True, keeps_all=False,
        order=_zero_bubble_v, least_microbatches=one_microbatch, filling=one_a_coordinate, round_size=one_by_one,
        in_flight=counted(_zero_bubble_v),
        idle=half_idle, stage_weight=even_weight, cut_seconds=nothing_more,
    ),
    "interleaved": Kind(
        title="interleaved 1F1B", placement="loop", turns=(2, UNBOUNDED), splits_backward=False, is_searched=True, keeps_all=False,
        order=_interleaved, least_microbatches=one_microbatch, filling=lambda p: 2 * p - 1,
        round_size=lambda p, m: 0 if m % p else p,
        in_flight=lambda c, p, m, v: min(2 * (p - 1 - c) + (v - 1) * _rounds(p, m)[0] + 1, m * v),
        idle=whole_idle, stage_weight=even_weight, cut_seconds=nothing_more,
    ),
    "breadth-first": Kind(
        title="breadth-first (GPipe over several turns)", placement="loop", turns=(2, UNBOUNDED), splits_backward=False,
        is_searched=False, keeps_all=True,
        order=_breadth_first, least_microbatches=one_microbatch, filling=one_a_coordinate, round_size=one_by_one,
        in_flight=all_of_them,
        idle=whole_idle, stage_weight=even_weight, cut_seconds=nothing_more,
    ),
    "dualpipev": Kind(
        title="DualPipeV", placement="v", turns=(2, 2), splits_backward=True, is_searched=False, keeps_all=False,
        order=_dualpipe_v, least_microbatches=lambda p: 2 * p, filling=one_a_coordinate, round_size=one_by_one,
        in_flight=counted(_dualpipe_v),
        idle=half_idle, stage_weight=even_weight, cut_seconds=nothing_more,
    ),
}  # fmt: skip
"""In the order in which a search looks at them."""

if unknown := set(get_args(ScheduleKind)) ^ set(KINDS):
    raise TypeError(
        f"schedule '{min(unknown)}' is a name without a kind, or a kind without a name: {nearest('', KINDS)}"
    )
SEARCHED: tuple[ScheduleKind, ...] = tuple(name for name, kind in KINDS.items() if kind.is_searched)
