"""A Play: what a step takes when every coordinate does its work in order, and where its time goes.

    step      = busy + exposed + idle, on every coordinate
    busy      seconds of its own work
    exposed   seconds it waits for what is made and on its way, or is held by a send when it could go on
    idle      the rest: nothing to do, at the start, in the middle, or at the end
    bubble    = idle / busy of the busiest coordinate: an ideal step would be its busy seconds

Known for equal stages and free transfers; f and b are the seconds of a forward and a backward of one stage:

    gpipe, 1f1b   bubble = (p-1) / m
    interleaved   bubble = (p-1) / (v m)                             where p divides m
    zb            idle   = (p-1) max(f + b_inputs - b_weights, f, b_inputs)   where m ≥ 2p; ZB-H1 (2401.10241) gives the first term
    zbv           idle   = (p-1) f                                   where m ≥ 2p and f = b_inputs = b_weights; dualpipev the same

Updates are not played: whoever costs a step adds them. Memory does not depend on time: cost/memory/peak_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.core.codec import Value
from meshwright.core.pipeline.kinds import ScheduleKind, kind_of
from meshwright.core.pipeline.schedule import Action, Order
from meshwright.cost.timing import StageSeconds, Transfers, time_order
from meshwright.rules.schedules import make_order


class Play(Value, kw_only=True):
    """The seconds of a played step, by coordinate."""

    step_seconds: float
    busy_seconds: tuple[float, ...]
    exposed_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]

    @property
    def busiest(self) -> int:
        """The coordinate with the most work: no order can make the step shorter than that."""
        return self.busy_seconds.index(max(self.busy_seconds))

    @property
    def bubble(self) -> float:
        """Idle time over ideal time."""
        return self.idle_seconds[self.busiest] / self.busy_seconds[self.busiest]


class Span(NamedTuple):
    """When an action ran. An exposed reduction after the last backward of a stage is not part of it."""

    action: Action
    start_seconds: float
    end_seconds: float


def play(order: Order, stages: Sequence[StageSeconds], transfers: Transfers = "asynchronous") -> Play:
    """The step of one order of work; `stages` has one entry a stage."""
    timing = time_order(order, stages, transfers)
    step = max(timing.ends)
    parts = zip(timing.busy, timing.exposed, strict=True)
    return Play(
        step_seconds=step,
        busy_seconds=tuple(timing.busy),
        exposed_seconds=tuple(timing.exposed),
        idle_seconds=tuple(max(0.0, step - busy - exposed) for busy, exposed in parts),  # no less for rounding
    )


FULL_ROUNDS = 3
"""Microbatches per stage after which the stages of a pipeline repeat their order until the end."""
SAME = 1e-9
"""Relative difference of two steps below which they are taken to grow alike."""


def enough_microbatches(kind: ScheduleKind, num_coordinates: int, num_microbatches: int) -> int:
    """How many fill the pipeline: with more, as many are in flight. Not where a schedule keeps all, or its rounds are not alike."""
    enough = FULL_ROUNDS * num_coordinates
    facts = kind_of(kind)
    regular = not facts.keeps_all and facts.round_size(num_coordinates, num_microbatches) > 0
    return enough if regular and enough < num_microbatches else num_microbatches


def play_schedule(
    kind: ScheduleKind,
    num_coordinates: int,
    num_microbatches: int,
    virtual: int,
    stages: Sequence[StageSeconds],
    transfers: Transfers = "asynchronous",
) -> Play:
    """The step of a schedule. A long one is played three times shortly, a round more each time.

    A step is the longest of many paths, each of which grows by a constant with every round: the step grows ever faster, and
    in the end as the steepest path. Where it has reached what the busiest coordinate does in a round, and both rounds grew
    alike, the rest of the step does too; else it is played as a whole. How the waiting of other coordinates divides into
    exposed and idle is that of the short play.
    """
    facts = kind_of(kind)
    step = facts.round_size(num_coordinates, num_microbatches) or 1
    first = 2 * num_coordinates * virtual
    first += (num_microbatches - first) % step

    def played(count: int) -> Play:
        return play(make_order(kind, num_coordinates, count, virtual), stages, transfers)

    regular = not facts.splits_backward and facts.round_size(num_coordinates, num_microbatches) > 0
    if not regular or num_microbatches <= 4 * first:  # where backward runs in halves, waiting moves about for long
        return played(num_microbatches)
    one, two, three = (played(first + number * step) for number in range(3))
    if not _is_steady(one, two, three, max(stage.transfer for stage in stages) * virtual * step):
        return played(num_microbatches)
    return _extended(two, three, (num_microbatches - first - 2 * step) // step)


def _is_steady(one: Play, two: Play, three: Play, sent_seconds: float) -> bool:
    """Whether the last round is what every later one will be. sent_seconds: of the messages of a round on the slowest link."""
    tolerance = SAME * three.step_seconds
    growth = three.step_seconds - two.step_seconds
    work = max(after - before for before, after in zip(two.busy_seconds, three.busy_seconds, strict=True))
    if abs(growth - max(work, sent_seconds)) > tolerance:
        return False
    worst = three.busiest
    waited = [play.exposed_seconds[worst] for play in (one, two, three)]
    return abs(growth - (two.step_seconds - one.step_seconds)) <= tolerance and max(waited) - min(waited) <= tolerance


def _extended(before: Play, last: Play, times: int) -> Play:
    """The last of two plays that are a round apart, extended by `times` rounds."""

    def longer(name: str) -> tuple[float, ...]:
        return tuple(b + times * (b - a) for a, b in zip(getattr(before, name), getattr(last, name), strict=True))

    step = last.step_seconds + times * (last.step_seconds - before.step_seconds)
    busy, exposed = longer("busy_seconds"), longer("exposed_seconds")
    idle = tuple(max(0.0, step - one - other) for one, other in zip(busy, exposed, strict=True))
    return Play(step_seconds=step, busy_seconds=busy, exposed_seconds=exposed, idle_seconds=idle)


def timeline(
    order: Order, stages: Sequence[StageSeconds], transfers: Transfers = "asynchronous"
) -> tuple[tuple[Span, ...], ...]:
    """When every action of each coordinate ran, for drawing."""
    timing = time_order(order, stages, transfers)
    return tuple(
        tuple(Span(action, start, end) for action, (start, end) in zip(row, spans, strict=True))
        for row, spans in zip(order, timing.spans, strict=True)
    )
