"""The player: known bubbles exactly, another simulation of the same rules, and no step that shrinks when work grows."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick, schedule_sizes

from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.pipeline.schedule import Action, Order
from meshwright.core.plan import ScheduleKind
from meshwright.cost.play import play, play_schedule, timeline
from meshwright.cost.timing import StageSeconds, Transfers
from meshwright.rules.schedules import make_order

Sizes = tuple[ScheduleKind, int, int, int]

seconds = st.integers(1, 6)
modes = st.sampled_from(["asynchronous", "requested", "blocking"])


def equal_stages(count: int, forward: float, inputs: float, weights: float, **more: float) -> list[StageSeconds]:
    return [StageSeconds(forward=forward, backward=inputs + weights, weights=weights, **more)] * count


@st.composite
def cases(draw: st.DrawFn, most: int = 4) -> tuple[Order, list[StageSeconds]]:
    """An order and uneven stages. Whole seconds, so that sums are exact."""
    sizes = draw(schedule_sizes(most=most))
    _, num_coordinates, _, virtual = sizes
    whole = st.integers(0, 5)
    stage = st.builds(StageSeconds, **dict.fromkeys(StageSeconds.__struct_fields__, whole))
    count = num_coordinates * virtual
    return make_order(*sizes), draw(st.lists(stage, min_size=count, max_size=count))


# Known bubbles: equal stages, free transfers


@quick
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24), seconds, seconds)
def test_gpipe_and_1f1b_bubble(kind: ScheduleKind, p: int, m: int, forward: int, backward: int) -> None:
    found = play(make_order(kind, p, m), equal_stages(p, forward, backward, 0))
    assert found.bubble == (p - 1) / m
    assert found.step_seconds == (m + p - 1) * (forward + backward)
    assert found.idle_seconds == ((p - 1) * (forward + backward),) * p


@quick
@given(st.integers(1, 6), st.integers(1, 5), st.integers(2, 4), seconds, seconds)
def test_interleaved_bubble(p: int, num_rounds: int, v: int, forward: int, backward: int) -> None:
    m = p * num_rounds
    found = play(make_order("interleaved", p, m, v), equal_stages(p * v, forward, backward, 0))
    assert found.bubble == (p - 1) / (v * m)


@quick
@given(st.integers(1, 5), st.integers(0, 12), st.integers(2, 4), seconds, seconds)
def test_breadth_first_bubble(p: int, more: int, v: int, forward: int, backward: int) -> None:
    """That of interleaved stages, for any number of microbatches that fills the pipeline."""
    m = p + more
    found = play(make_order("breadth-first", p, m, v), equal_stages(p * v, forward, backward, 0))
    assert found.bubble == (p - 1) / (v * m)


@quick
@given(st.integers(1, 6), st.integers(0, 20), seconds, seconds, seconds)
def test_zero_bubble_idle(p: int, more: int, forward: int, inputs: int, weights: int) -> None:
    """As published where weights take no longer than a forward or a backward for inputs; no gap can hide more."""
    m = 2 * p + more
    stages = equal_stages(p, forward, inputs, weights)
    found = play(make_order("zb", p, m), stages)
    published = forward + inputs - weights
    assert max(found.idle_seconds) == (p - 1) * max(published, forward, inputs)
    if weights <= min(forward, inputs):
        assert max(found.idle_seconds) == (p - 1) * published
    assert p == 1 or found.bubble < play(make_order("1f1b", p, m), stages).bubble


@quick
@given(st.sampled_from(["zbv", "dualpipev"]), st.integers(1, 6), st.integers(0, 20), seconds)
def test_in_a_v_only_the_way_to_the_last_coordinate_is_lost(kind: ScheduleKind, p: int, more: int, unit: int) -> None:
    m = 2 * p + more
    found = play(make_order(kind, p, m, 2), equal_stages(2 * p, unit, unit, unit))
    assert found.idle_seconds == ((p - 1) * unit,) * p
    assert found.bubble == (p - 1) / (6 * m)


@st.composite
def played_cuts(draw: st.DrawFn) -> tuple[Sizes, list[tuple[int, int]], list[int], float]:
    """A schedule on uneven stages: its sizes, seconds of forward, backward and weights of each stage, and the step, where messages
    are free."""
    sizes = draw(schedule_sizes(most=5))
    kind, p, m, v = sizes
    cut = draw(st.lists(st.tuples(seconds, seconds), min_size=p * v, max_size=p * v))
    weights = [draw(st.integers(0, backward)) if KINDS[kind].splits_backward else 0 for _, backward in cut]
    stages = [StageSeconds(forward=f, backward=b, weights=w) for (f, b), w in zip(cut, weights, strict=True)]
    return sizes, cut, weights, play(make_order(kind, p, m, v), stages).step_seconds


@quick
@given(played_cuts())
def test_no_cut_is_faster_than_its_kind_says(case: tuple[Sizes, list[tuple[int, int]], list[int], float]) -> None:
    (name, p, m, _), cut, _, step = case
    kind = KINDS[name]
    assert step >= kind.cut_seconds(cut, m) - 1e-9
    if not kind.has_turns and m > 1:
        first = sum(f if kind.splits_backward else f + b for f, b in cut)
        assert step >= first + max(kind.stage_weight(stage, p, m, f, b) for stage, (f, b) in enumerate(cut)) - 1e-9


@quick
@given(schedule_sizes(), seconds)
def test_the_bubble_of_even_stages_is_about_what_its_kind_says(sizes: Sizes, unit: int) -> None:
    """What a search expects, before it cuts: by it plans are tried in order, so that it may be off, but not far."""
    name, p, m, v = sizes
    m += 2 * p
    found = play(make_order(name, p, m, v), equal_stages(p * v, unit / v, unit / v, unit / v))
    expected = 3 * unit * m + (p - 1) * KINDS[name].idle(unit, unit, unit, v)
    assert expected <= found.step_seconds * (1 + 1e-9)
    assert found.step_seconds <= 1.5 * expected


@quick
@given(schedule_sizes(), seconds)
def test_no_order_beats_its_busiest_coordinate(sizes: Sizes, unit: int) -> None:
    _, p, m, v = sizes
    found = play(make_order(*sizes), equal_stages(p * v, unit, unit, unit))
    assert found.busy_seconds == (3 * unit * m * v,) * p
    assert found.step_seconds >= 3 * unit * m * v + (p - 1) * unit


# The same rules, simulated another way


def neighbours(action: Action, num_stages: int) -> tuple[int | None, int | None]:
    """Stages an action takes from and gives to."""
    if action.kind == "backward_weights":
        return None, None
    way = 1 if action.kind == "forward" else -1
    inside = [stage if 0 <= stage < num_stages else None for stage in (action.stage - way, action.stage + way)]
    return inside[0], inside[1]


def lengths(order: Order, stages: list[StageSeconds]) -> dict[Action, tuple[float, float]]:
    """Seconds of each action, and of what comes after it."""
    found = {action: (float(stages[action.stage].of(action.kind)), 0.0) for row in order for action in row}
    for number, stage in enumerate(stages):
        own = [action for row in order for action in row if action.stage == number]
        forwards = [action for action in own if action.kind == "forward"]
        found[forwards[0]] = (found[forwards[0]][0] + stage.gather_once, 0.0)
        found[own[-1]] = (found[own[-1]][0], stage.reduce_once)
    return found


def simulated(order: Order, stages: list[StageSeconds]) -> dict[Action, float]:
    """Starts of all actions, by a queue of events: coordinates and links each do one thing at a time."""
    homes = {action.stage: c for c, row in enumerate(order) for action in row}
    work, starts = lengths(order, stages), {}
    todo, idle = [deque(row) for row in order], set(range(len(order)))
    here: set[tuple[bool, int, int]] = set()  # what has reached its stage
    links: dict[tuple[int, int], deque[Any]] = {}
    events: list[Any] = []
    now, ticket = 0.0, 0

    def later(delay: float, *event: Any) -> None:
        nonlocal ticket
        ticket += 1
        heapq.heappush(events, (now + delay, ticket, event))

    def start_what_can() -> None:
        for c in sorted(idle):
            if todo[c]:
                action = todo[c][0]
                maker, _ = neighbours(action, len(stages))
                if maker is None or (action.kind == "forward", action.stage, action.microbatch) in here:
                    starts[todo[c].popleft()] = now
                    idle.discard(c)
                    later(work[action][0], "made", action)

    def send(link: tuple[int, int]) -> None:
        later(links[link][0][1], "landed", link)

    start_what_can()
    while events:
        now, _, (what, subject) = heapq.heappop(events)
        if what == "made":
            later(work[subject][1], "rested", homes[subject.stage])
            _, taker = neighbours(subject, len(stages))
            if taker is not None:
                link = homes[subject.stage], homes[taker]
                delay = 0.0 if link[0] == link[1] else stages[min(subject.stage, taker)].transfer
                links.setdefault(link, deque()).append(((subject.kind == "forward", taker, subject.microbatch), delay))
                if len(links[link]) == 1:
                    send(link)
        elif what == "landed":
            here.add(links[subject].popleft()[0])
            if links[subject]:
                send(subject)
        else:
            idle.add(subject)
        start_what_can()
    return starts


def relaxed(order: Order, stages: list[StageSeconds]) -> dict[Action, float]:
    """Starts of all actions with blocking transfers: the rules as inequalities, raised until all of them hold."""
    homes = {action.stage: c for c, row in enumerate(order) for action in row}
    work = lengths(order, stages)
    starts = dict.fromkeys(work, 0.0)

    def wire(stage: int, other: int | None) -> float:
        return 0.0 if other is None or homes[stage] == homes[other] else stages[min(stage, other)].transfer

    def bound(action: Action, before: Action | None) -> float:
        maker, _ = neighbours(action, len(stages))
        free = sent = made = 0.0
        if before is not None:
            end = starts[before] + work[before][0]
            free, sent = end + work[before][1], end + wire(before.stage, neighbours(before, len(stages))[1])
        if maker is not None:
            kinds = ("forward",) if action.kind == "forward" else ("backward", "backward_inputs")
            made = max(
                starts[a] + work[a][0] for a in (Action(k, maker, action.microbatch) for k in kinds) if a in starts
            )
        return max(sent, max(free, made) + wire(action.stage, maker))

    changed = True
    while changed:
        changed = False
        for row in order:
            for before, action in zip((None, *row), row, strict=False):
                least = bound(action, before)
                changed |= least > starts[action]
                starts[action] = max(starts[action], least)
    return starts


@quick
@given(cases())
def test_asynchronous_transfers_as_simulated(case: tuple[Order, list[StageSeconds]]) -> None:
    order, stages = case
    played = timeline(order, stages, "asynchronous")
    assert {span.action: span.start_seconds for row in played for span in row} == simulated(order, stages)


@quick
@given(cases(most=3))
def test_blocking_transfers_as_relaxed(case: tuple[Order, list[StageSeconds]]) -> None:
    order, stages = case
    played = timeline(order, stages, "blocking")
    assert {span.action: span.start_seconds for row in played for span in row} == relaxed(order, stages)


# What must hold for every play


@quick
@given(cases(), modes)
def test_busy_exposed_and_idle_make_the_step(case: tuple[Order, list[StageSeconds]], mode: Transfers) -> None:
    order, stages = case
    found = play(order, stages, mode)
    for parts in zip(found.busy_seconds, found.exposed_seconds, found.idle_seconds, strict=True):
        assert sum(parts) == found.step_seconds
        assert min(parts) >= 0
    assert found.step_seconds >= max(span.end_seconds for row in timeline(order, stages, mode) for span in row)


@quick
@given(cases(), modes, st.data())
def test_more_work_or_a_slower_link_never_makes_the_step_shorter(
    case: tuple[Order, list[StageSeconds]], mode: Transfers, data: st.DataObject
) -> None:
    order, stages = case
    slowed = data.draw(st.integers(0, len(stages) - 1))
    field = data.draw(st.sampled_from(StageSeconds.__struct_fields__))
    fields = {field, "backward"} if field == "weights" else {field}  # they are a part of backward
    added = data.draw(seconds)
    more = {name: getattr(stages[slowed], name) + added for name in fields}
    slower = [*stages]
    slower[slowed] = msgspec.structs.replace(stages[slowed], **more)
    assert play(order, slower, mode).step_seconds >= play(order, stages, mode).step_seconds


@quick
@given(cases())
def test_free_transfers_hold_nobody(case: tuple[Order, list[StageSeconds]]) -> None:
    order, stages = case
    free = [msgspec.structs.replace(stage, transfer=0.0) for stage in stages]
    assert play(order, free, "blocking") == play(order, free, "requested") == play(order, free, "asynchronous")
    assert play(order, stages, "blocking").step_seconds >= play(order, free, "blocking").step_seconds


@quick
@given(cases())
def test_messages_that_wait_to_be_asked_for_are_never_there_earlier(case: tuple[Order, list[StageSeconds]]) -> None:
    """What bounds a step of messages that leave at once bounds one of these (searching/bounds/step_seconds.py)."""
    order, stages = case
    assert play(order, stages, "requested").step_seconds >= play(order, stages).step_seconds * (1 - 1e-12)


# By hand


def test_transfers_by_hand() -> None:
    """Two stages, one microbatch: forward, transfer, forward, backward, transfer, backward."""
    stages = equal_stages(2, 1, 2, 0, transfer=3)
    for mode in get_args(Transfers):
        found = play(make_order("1f1b", 2, 1), stages, mode)
        assert found.step_seconds == 1 + 3 + 1 + 2 + 3 + 2
        assert found.exposed_seconds == (3, 3)  # each waits for one message
        assert found.idle_seconds == (6, 6)


def test_what_is_requested_is_asked_for_one_action_ahead() -> None:
    """The first goes on at once. The second asks for its first message when it needs it, for the next while it works."""
    stages = equal_stages(2, 2, 2, 0, transfer=3)
    first, second = timeline(make_order("gpipe", 2, 3), stages, "requested")
    assert [span.start_seconds for span in first[:3]] == [0, 2, 4]
    assert [span.start_seconds for span in second[:3]] == [5, 8, 11]  # asked for at 5 and 8, a transfer each
    quick_link = equal_stages(2, 2, 2, 0, transfer=1)
    _, second = timeline(make_order("gpipe", 2, 3), quick_link, "requested")
    assert [span.start_seconds for span in second[:3]] == [3, 5, 7]  # crosses while the second works


def test_a_blocking_send_holds_its_maker() -> None:
    stages = equal_stages(2, 1, 2, 0, transfer=3)
    first, second = timeline(make_order("gpipe", 2, 2), stages, "blocking")
    assert [span.start_seconds for span in first[:2]] == [0, 4]
    assert [span.start_seconds for span in second[:2]] == [4, 8]
    first, second = timeline(make_order("gpipe", 2, 2), stages, "asynchronous")
    assert [span.start_seconds for span in first[:2]] == [0, 1]
    assert [span.start_seconds for span in second[:2]] == [4, 7]


def test_what_is_sent_and_what_is_taken_pass_each_other() -> None:
    """1F1B in its steady state: each of the two waits one transfer between a forward and a backward, not two."""
    first, second = timeline(make_order("1f1b", 2, 4), equal_stages(2, 10, 10, 0, transfer=1), "blocking")
    assert [span.start_seconds for span in second[1:4]] == [21, 32, 42]
    assert [span.start_seconds for span in first[2:5]] == [32, 42, 53]


def test_a_slow_link_carries_one_message_at_a_time() -> None:
    starts = [
        span.start_seconds for span in timeline(make_order("gpipe", 2, 3), equal_stages(2, 1, 1, 0, transfer=5))[1]
    ]
    assert starts[:3] == [6, 11, 16]


def test_gathering_and_reducing_come_once_a_step() -> None:
    stages = equal_stages(1, 1, 2, 0, gather_once=10, reduce_once=100)
    assert play(make_order("1f1b", 1, 4), stages).step_seconds == 10 + 4 * 3 + 100


def test_the_last_gradient_does_not_wait_for_the_reduction() -> None:
    stages = [StageSeconds(forward=1, backward=1), StageSeconds(forward=1, backward=1, reduce_once=50)]
    spans = timeline(make_order("1f1b", 2, 1), stages)
    assert spans[0][-1].end_seconds == 4
    assert play(make_order("1f1b", 2, 1), stages).step_seconds == 53


def test_an_uneven_stage_sets_the_pace() -> None:
    stages = [
        StageSeconds(forward=1, backward=2),
        StageSeconds(forward=2, backward=4),
        StageSeconds(forward=1, backward=2),
    ]
    found = play(make_order("1f1b", 3, 10), stages)
    assert found.busiest == 1
    assert found.idle_seconds[1] == 1 + 1 + 2  # for the first forward, the first backward, and the last one
    assert found.bubble == 4 / 60


def test_an_order_that_cannot_run_is_refused() -> None:
    order = ((Action("backward", 0, 0), Action("forward", 0, 0)), (Action("forward", 1, 0), Action("backward", 1, 0)))
    with pytest.raises(ScheduleError, match="deadlock: coordinate 0 stops after 0 of 2 actions"):
        play(order, equal_stages(2, 1, 1, 0))


@pytest.mark.parametrize("sizes", [("1f1b", 64, 512, 1), ("interleaved", 35, 280, 3)])
def test_the_largest_published_runs_have_their_known_bubble(sizes: Sizes) -> None:
    _, p, m, v = sizes
    assert play(make_order(*sizes), equal_stages(p * v, 1.0, 1.0, 1.0)).bubble == pytest.approx((p - 1) / (m * v))


@quick
@given(
    st.sampled_from(tuple(KINDS)),
    st.integers(2, 4),
    st.integers(1, 12),
    st.data(),
)
def test_a_long_schedule_takes_as_long_as_all_of_it_played(
    kind: ScheduleKind, pp: int, rounds: int, data: st.DataObject
) -> None:
    """Played shortly and extended, or as a whole: the same step, and the same parts on the busiest coordinate."""
    virtual = KINDS[kind].turns[0]
    seconds = st.floats(0.01, 1.0)
    stages = []
    for _ in range(pp * virtual):
        forward, inputs, weights, transfer = (data.draw(seconds) for _ in range(4))
        stages.append(
            StageSeconds(
                forward=forward,
                backward=inputs + weights,
                weights=weights,
                transfer=transfer / 10,
            )
        )
    count = 8 * pp * virtual + rounds * pp
    short = play_schedule(kind, pp, count, virtual, stages)
    whole = play(make_order(kind, pp, count, virtual), stages)  # type: ignore[arg-type]
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-7)
    assert short.busy_seconds == pytest.approx(whole.busy_seconds, rel=1e-7)
    worst, small = whole.busiest, 1e-7 * whole.step_seconds
    assert short.exposed_seconds[worst] == pytest.approx(whole.exposed_seconds[worst], rel=1e-6, abs=small)
    assert short.idle_seconds[worst] == pytest.approx(whole.idle_seconds[worst], rel=1e-6, abs=small)
