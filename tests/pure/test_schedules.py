"""Generated schedules: legal at every size, within their bounds of memory, and word for word as published."""

from __future__ import annotations

from dataclasses import fields
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legal_schedule import check, most_in_flight
from strategies import quick, schedule_sizes

from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.kinds import KINDS, Kind, in_flight
from meshwright.core.pipeline.placement import coordinate_of, stage_at
from meshwright.core.plan import ScheduleKind
from meshwright.rules.schedules import make_order, make_schedule

Sizes = tuple[ScheduleKind, int, int, int]
LETTERS = {"forward": "F", "backward": "B", "backward_inputs": "I", "backward_weights": "W"}


def written(kind: ScheduleKind, num_coordinates: int, num_microbatches: int, virtual: int = 1) -> list[str]:
    """One line a coordinate: `F` and the microbatch, with the stage before it where a coordinate has several."""
    return [
        " ".join((f"{a.stage}" if virtual > 1 else "") + LETTERS[a.kind] + f"{a.microbatch}" for a in row)
        for row in make_order(kind, num_coordinates, num_microbatches, virtual)
    ]


@quick
@given(schedule_sizes())
def test_generated_schedules_are_legal(sizes: Sizes) -> None:
    schedule = make_schedule(*sizes)
    assert check(schedule) is schedule
    assert schedule.order == make_order(*sizes)


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("num_coordinates", [1, 2, 3, 4, 5])
def test_interleaved_is_legal_for_every_number_of_microbatches(num_coordinates: int, virtual: int) -> None:
    for num_microbatches in range(1, 4 * num_coordinates):
        check(make_schedule("interleaved", num_coordinates, num_microbatches, virtual))


@quick
@given(schedule_sizes())
def test_microbatches_of_a_stage_go_in_order(sizes: Sizes) -> None:
    _, _, num_microbatches, _ = sizes
    seen: dict[tuple[str, int], list[int]] = {}
    for action in (action for row in make_order(*sizes) for action in row):
        direction = "backward" if action.kind in ("backward", "backward_inputs") else action.kind
        seen.setdefault((direction, action.stage), []).append(action.microbatch)
    for (direction, _), microbatches in seen.items():
        assert microbatches == sorted(microbatches)
        assert direction == "backward_weights" or microbatches == list(range(num_microbatches))


# Memory: the most activations in flight


@quick
@given(st.integers(1, 8), st.integers(1, 20))
def test_most_in_flight_with_one_stage_a_coordinate(p: int, m: int) -> None:
    gpipe, alternating, split = (make_schedule(kind, p, m) for kind in ("gpipe", "1f1b", "zb"))
    for c in range(p):
        assert most_in_flight(gpipe, c) == m
        assert most_in_flight(alternating, c) == min(p - c, m)
        assert most_in_flight(split, c) == min(p, m)


@quick
@given(st.integers(1, 6), st.integers(1, 24), st.integers(2, 4))
def test_most_in_flight_interleaved(p: int, m: int, v: int) -> None:
    schedule = make_schedule("interleaved", p, m, v)
    num_rounds = max(1, m // p)
    largest_round = -(-m // num_rounds)
    assert largest_round == p or m % p
    for c in range(p):
        assert most_in_flight(schedule, c) == min((p - 1 - c) * 2 + (v - 1) * largest_round + 1, v * m)


@quick
@given(schedule_sizes(kinds=("zbv", "dualpipev"), most=8))
def test_most_in_flight_in_a_v(sizes: Sizes) -> None:
    kind, p, _, _ = sizes
    schedule = make_schedule(*sizes)
    bound = 2 * p + (kind == "dualpipev")
    assert all(most_in_flight(schedule, c) <= bound for c in range(p))


@quick
@given(schedule_sizes(most=8))
def test_what_planning_counts_in_flight_is_what_the_schedule_keeps(sizes: Sizes) -> None:
    """A full pipeline of three times its depth keeps as much as a longer one."""
    kind, p, m, v = sizes
    schedule = make_schedule(*sizes)
    counted = in_flight(kind, p, m, v)
    assert counted == tuple(most_in_flight(schedule, c) for c in range(p))
    assert not KINDS[kind].keeps_all or counted == (m * v,) * p


@quick
@given(schedule_sizes(most=6))
def test_with_more_than_fill_the_pipeline_gradients_are_there_when_it_is_fullest(sizes: Sizes) -> None:
    """The search counts gradients beside the most activations by `filling`: too small a number rules out plans that fit."""
    kind, p, m, _ = sizes
    if KINDS[kind].keeps_all or m <= KINDS[kind].filling(p):
        return
    for row in make_order(*sizes):
        makes_gradients = [action.kind in ("backward", "backward_weights") for action in row]
        steps = [(action.kind == "forward") - makes for action, makes in zip(row, makes_gradients, strict=True)]
        held = list(accumulate(steps))
        assert max(held[makes_gradients.index(True) :]) == max(held)


def test_a_kind_that_lacks_a_field_is_none() -> None:
    known = {field.name: getattr(KINDS["1f1b"], field.name) for field in fields(Kind)}
    assert Kind(**known) == KINDS["1f1b"]
    for name in known:
        with pytest.raises(TypeError, match=name):
            Kind(**{other: value for other, value in known.items() if other != name})


# Word for word


def test_gpipe_and_1f1b_in_full() -> None:
    assert written("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert written("1f1b", 2, 3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_interleaved_in_full() -> None:
    assert written("interleaved", 2, 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


def test_breadth_first_in_full() -> None:
    assert written("breadth-first", 2, 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


def test_zero_bubble_in_full() -> None:
    assert written("zb", 3, 4) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zero_bubble_in_a_v_in_full() -> None:
    assert written("zbv", 2, 3, 2) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_dualpipe_v_in_full() -> None:
    assert written("dualpipev", 2, 4, 2) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


# Places and refusals


@given(st.integers(0, 40), st.integers(1, 6), st.sampled_from(["loop", "v"]))
def test_a_stage_is_found_where_it_lies(stage: int, p: int, placement: str) -> None:
    home = coordinate_of(stage, p, placement)
    assert 0 <= home < p
    assert stage_at(home, stage // p, p, placement) == stage


def test_a_v_comes_back() -> None:
    assert [coordinate_of(stage, 3, "v") for stage in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, 0), (-1, 2)])
def test_a_schedule_of_nothing_is_refused(num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="at least one stage and one microbatch"):
        make_schedule("gpipe", num_stages, num_microbatches)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            ("dualpipev", 4, 7, 2),
            "needs 8 microbatches or more, got 7: make microbatches smaller, lower pp, or use zbv",
        ),
        (("zbv", 4, 8, 1), "'zbv' runs two stages per coordinate, but virtual=1: set virtual to 2"),
        (("dualpipev", 4, 8, 3), "'dualpipev' runs two stages per coordinate, but virtual=3: set virtual to 2"),
        (("interleaved", 4, 8, 1), "virtual=1: set virtual to 2 or more, or use 1f1b"),
        (("zb", 4, 8, 2), "'zb' runs one stage per coordinate, but virtual=2: set virtual to 1, or use one of"),
    ],
)
def test_sizes_a_schedule_cannot_have_are_refused(sizes: Sizes, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        make_schedule(*sizes)
