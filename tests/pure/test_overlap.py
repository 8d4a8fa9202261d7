"""Overlap of communication with compute: lanes played by hand, and properties of all lanes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from meshwright.cost.overlap import Lane, exposed_seconds, play_backward, play_forward

seconds = st.floats(0, 10)
lanes_of = st.lists(st.builds(Lane, seconds, seconds, seconds), max_size=6)


def test_nothing_to_move_takes_as_long_as_compute() -> None:
    lanes = [Lane(1.0), Lane(2.0), Lane(3.0)]
    assert play_forward(lanes) == play_backward(lanes) == 6
    assert play_forward([]) == play_backward([]) == 0
    assert exposed_seconds(lanes, 6, slowdown=0.5) == 0


def test_forward_gathers_one_block_ahead() -> None:
    """The first gather shows; the others hide behind blocks that take longer."""
    assert play_forward([Lane(3.0, gather=1.0)] * 4) == 1 + 4 * 3
    assert play_forward([Lane(1.0, gather=3.0)] * 4) == 4 * 3 + 1, "the link is the bottleneck"


def test_only_two_blocks_are_gathered_at_a_time() -> None:
    """Gather 2 waits for block 0 to be done: 1 + 10 + max(0, 1 - 10) …, not at once after gather 1."""
    lanes = [Lane(10.0, gather=1.0), Lane(0.0, gather=1.0), Lane(0.0, gather=5.0)]
    assert play_forward(lanes) == 1 + 10 + 5


def test_backward_reduces_what_is_ready() -> None:
    assert play_backward([Lane(3.0, reduce=1.0)] * 4) == 4 * 3 + 1, "the last reduction shows"
    assert play_backward([Lane(1.0, reduce=3.0)] * 4) == 1 + 4 * 3, "the link is the bottleneck"


def test_gathers_and_reductions_share_the_link_in_backward() -> None:
    lanes = [Lane(2.0, gather=1.0, reduce=1.0)] * 3
    assert play_backward(lanes) == 1 + 3 * 2 + 1
    slow = [Lane(0.0, gather=1.0, reduce=1.0)] * 3
    assert play_backward(slow) == 6, "one at a time: three gathers and three reductions"


@pytest.mark.parametrize(
    ("played", "slowdown", "exposed"), [(3, 0, 0), (5, 0, 2), (3, 1, 2), (3, 0.5, 1), (4, 0.5, 1.5)]
)
def test_communication_hides_behind_compute_and_slows_it(played: float, slowdown: float, exposed: float) -> None:
    """Three seconds of compute, two of communication."""
    assert exposed_seconds([Lane(3.0, gather=2.0)], played, slowdown) == exposed


@quick
@given(lanes_of)
def test_a_step_is_between_the_longer_stream_and_both_in_a_row(lanes: list[Lane]) -> None:
    compute = sum(lane.compute for lane in lanes)
    gathers, reductions = sum(lane.gather for lane in lanes), sum(lane.reduce for lane in lanes)
    for played, moved in ((play_forward(lanes), gathers), (play_backward(lanes), gathers + reductions)):
        assert max(compute, moved) - 1e-9 <= played <= compute + moved + 1e-9


@quick
@given(lanes_of, st.floats(0, 1), st.floats(0, 1))
def test_a_faster_link_never_plays_slower(lanes: list[Lane], speed: float, slowdown: float) -> None:
    faster = [Lane(lane.compute, speed * lane.gather, speed * lane.reduce) for lane in lanes]
    for play in (play_forward, play_backward):
        assert play(faster) <= play(lanes) + 1e-9
    one, other = (exposed_seconds(part, play_backward(part), slowdown) for part in (faster, lanes))
    assert one <= other + 1e-9
