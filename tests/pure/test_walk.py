"""Walking the memory of a schedule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import quick, schedule_sizes

from meshwright.core.pipeline.schedule import Action
from meshwright.core.plan import ScheduleKind
from meshwright.cost.walk import StageBytes, in_flight_by_stage, memory_peaks
from meshwright.rules.schedules import make_order, make_schedule

Sizes = tuple[ScheduleKind, int, int, int]


@quick
@given(schedule_sizes())
def test_equal_stages_hold_what_is_in_flight(sizes: Sizes) -> None:
    schedule = make_schedule(*sizes)
    peaks = memory_peaks(schedule.order, [StageBytes(kept=10)] * schedule.num_stages)
    assert [peak.peak_bytes for peak in peaks] == [10 * schedule.most_in_flight(c) for c in range(len(peaks))]
    for peak in peaks:
        assert 10 * sum(peak.in_flight.values()) == peak.peak_bytes
        assert peak.action.kind == "forward"


@quick
@given(schedule_sizes(kinds=("zb", "zbv", "dualpipev")), st.integers(0, 10))
def test_what_a_backward_for_inputs_frees_is_not_held(sizes: Sizes, freed: int) -> None:
    order = make_order(*sizes)
    num_stages = sizes[1] * sizes[3]
    early = memory_peaks(order, [StageBytes(kept=10, freed_by_inputs=freed)] * num_stages)
    late = memory_peaks(order, [StageBytes(kept=10)] * num_stages)
    assert all(one.peak_bytes <= other.peak_bytes for one, other in zip(early, late, strict=True))


def test_in_flight_by_stage() -> None:
    assert in_flight_by_stage(make_order("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight_by_stage(make_order("zb", 4, 8)) == (4, 4, 4, 4)
    assert in_flight_by_stage(make_order("gpipe", 2, 5)) == (5, 5)
    assert in_flight_by_stage(make_order("interleaved", 2, 4, 2)) == (4, 3, 2, 1)


def test_the_fullest_moment_may_be_a_backward() -> None:
    order = make_order("1f1b", 2, 4)
    stages = [StageBytes(kept=10, backward_peak=5), StageBytes(kept=10, forward_peak=25, backward_peak=7)]
    first, last = memory_peaks(order, stages)
    assert (first.peak_bytes, first.action, first.place) == (25, Action("backward", 0, 0), 2)
    assert first.in_flight == {0: 2}
    assert (last.peak_bytes, last.action, last.in_flight) == (25, Action("forward", 1, 0), {1: 1})


def test_stages_of_a_coordinate_share_its_memory() -> None:
    order = make_order("zbv", 2, 4, 2)
    stages = [StageBytes(kept=size) for size in (1, 10, 100, 1000)]
    first, second = memory_peaks(order, stages)
    assert set(first.in_flight) == {0, 3}
    assert first.peak_bytes == sum(stages[s].kept * count for s, count in first.in_flight.items())
    assert second.peak_bytes == sum(stages[s].kept * count for s, count in second.in_flight.items())
