"""The validator of schedules: `check` refuses every planted error."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legal_schedule import check, most_in_flight
from strategies import quick

from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.schedule import Action, Schedule
from meshwright.rules.schedules import make_schedule

Rows = list[list[Action]]

small_schedules = st.builds(make_schedule, st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 4), st.integers(1, 4))


def rows_of(schedule: Schedule) -> Rows:
    return [list(actions) for actions in schedule.actions]


def with_rows(schedule: Schedule, rows: Iterable[Iterable[Action]]) -> Schedule:
    return msgspec.structs.replace(schedule, actions=tuple(map(tuple, rows)))


def by_hand(text: str, num_stages: int, num_microbatches: int, placement: str = "loop") -> Schedule:
    """One line a coordinate, one word an action: `F0.1` is the forward of stage 0, microbatch 1."""
    kinds = {
        "F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights", "U": "update",
        "SF": "send_forward", "RF": "receive_forward", "SB": "send_backward", "RB": "receive_backward",
    }  # fmt: skip

    def action(word: str) -> Action:
        letters = word.rstrip("0123456789.")
        stage, microbatch = word[len(letters) :].split(".")
        return Action(kinds[letters], int(stage), int(microbatch))

    return Schedule(
        kind="zb",
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        placement=placement,
        actions=tuple(tuple(map(action, line.split())) for line in text.strip().splitlines()),
    )


ZERO_BUBBLE = """
    F0.0 SF0.0 F0.1 SF0.1 RB0.0 I0.0 RB0.1 I0.1 W0.0 W0.1 U0.0
    RF1.0 F1.0 I1.0 SB1.0 RF1.1 F1.1 I1.1 SB1.1 W1.0 W1.1 U1.0
"""
IN_A_V = """
    F0.0 SF0.0 RF3.0 F3.0 B3.0 SB3.0 RB0.0 B0.0 U0.0 U3.0
    RF1.0 F1.0 F2.0 SF2.0 RB2.0 B2.0 B1.0 SB1.0 U1.0 U2.0
"""


@quick
@given(small_schedules, st.data())
def test_a_dropped_action_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rows = rows_of(schedule)
    row = data.draw(st.sampled_from(rows))
    dropped = row.pop(data.draw(st.integers(0, len(row) - 1)))
    with pytest.raises(ScheduleError, match=f"^{dropped} is never done"):
        check(with_rows(schedule, rows))


@quick
@given(small_schedules, st.data())
def test_a_doubled_action_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rows = rows_of(schedule)
    row = data.draw(st.sampled_from(rows))
    doubled = data.draw(st.sampled_from(row))
    row.insert(data.draw(st.integers(0, len(row))), doubled)
    with pytest.raises(ScheduleError, match=f"^{doubled} is done 2 times"):
        check(with_rows(schedule, rows))


@quick
@given(small_schedules.filter(lambda schedule: schedule.num_coordinates > 1), st.data())
def test_an_action_on_a_wrong_coordinate_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rows = rows_of(schedule)
    home = data.draw(st.integers(0, len(rows) - 1))
    away = data.draw(st.integers(0, len(rows) - 1).filter(lambda coordinate: coordinate != home))
    moved = rows[home].pop(data.draw(st.integers(0, len(rows[home]) - 1)))
    rows[away].insert(data.draw(st.integers(0, len(rows[away]))), moved)
    with pytest.raises(ScheduleError, match=f"^{moved} is on coordinate {away}, not {home}"):
        check(with_rows(schedule, rows))


@quick
@given(small_schedules, st.data())
def test_an_update_before_the_last_backward_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    rows = rows_of(schedule)
    row = data.draw(st.sampled_from(rows))
    update = row.pop()
    last_backward = max(place for place, action in enumerate(row) if action.kind == "backward")
    row.insert(data.draw(st.integers(0, last_backward)), update)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(with_rows(schedule, rows))


def test_a_deadlock_names_who_holds_up_the_others() -> None:
    out_of_order = by_hand(
        """
        F0.0 SF0.0 RB0.0 B0.0 U0.0
        RF1.0 F1.0 U1.0 B1.0 SB1.0
        """,
        num_stages=2,
        num_microbatches=1,
    )
    with pytest.raises(ScheduleError, match=r"coordinate 1 waits in 'update of stage 1, .* for 'backward of stage 1"):
        check(out_of_order)


def test_two_coordinates_that_wait_for_each_other_are_named() -> None:
    deadlocked = by_hand("RB0.0 F0.0 SF0.0 B0.0 U0.0 \n RF1.0 F1.0 B1.0 SB1.0 U1.0", num_stages=2, num_microbatches=1)
    with pytest.raises(
        ScheduleError, match=r"deadlock: coordinate 0 waits in 'receive_backward .* for 'send_backward of stage 1"
    ):
        check(deadlocked)


def precedences(num_stages: int, num_microbatches: int) -> dict[Action, set[Action]]:
    """What each action of a plain pipeline needs, written a second time."""
    needs: dict[Action, set[Action]] = {Action("update", stage, 0): set() for stage in range(num_stages)}
    for microbatch in range(num_microbatches):
        down = [
            (kind, stage) for stage in range(num_stages) for kind in ("receive_forward", "forward", "send_forward")
        ][1:-1]
        up = [
            (kind, stage) for stage in range(num_stages) for kind in ("send_backward", "backward", "receive_backward")
        ][1:-1]
        path = [Action(kind, stage, microbatch) for kind, stage in (*down, *reversed(up))]
        needs |= {later: {earlier} for earlier, later in pairwise(path)}
        for stage in range(num_stages):
            needs[Action("update", stage, 0)].add(Action("backward", stage, microbatch))
    return needs


def can_finish(schedule: Schedule) -> bool:
    sorter = TopologicalSorter(precedences(schedule.num_stages, schedule.num_microbatches))
    for row in schedule.actions:
        for earlier, later in pairwise(row):
            sorter.add(later, earlier)
    try:
        sorter.prepare()
    except CycleError:
        return False
    return True


def in_order(schedule: Schedule) -> bool:
    """Whether neighbours receive in the order of the sends; one stage a coordinate."""

    def microbatches(coordinate: int, kind: str) -> list[int]:
        return [action.microbatch for action in schedule.actions[coordinate] if action.kind == kind]

    return all(
        microbatches(here, "send_forward") == microbatches(there, "receive_forward")
        and microbatches(there, "send_backward") == microbatches(here, "receive_backward")
        for here, there in pairwise(range(schedule.num_coordinates))
    )


@quick
@given(
    small_schedules,
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
)
def test_swapped_actions_are_refused_exactly_when_they_deadlock_or_overtake(
    schedule: Schedule, swaps: list[tuple[int, int, int]]
) -> None:
    rows = rows_of(schedule)
    for coordinate, i, j in swaps:
        row = rows[coordinate % len(rows)]
        i, j = i % len(row), j % len(row)
        row[i], row[j] = row[j], row[i]
    swapped = with_rows(schedule, rows)
    if can_finish(swapped) and in_order(swapped):
        check(swapped)
    else:
        with pytest.raises(ScheduleError, match="order of the sends" if can_finish(swapped) else "deadlock"):
            check(swapped)


def test_a_message_that_overtakes_another_is_refused() -> None:
    legal = """
        F0.0 F0.1 SF0.0 SF0.1 RB0.0 B0.0 RB0.1 B0.1 U0.0
        RF1.0 F1.0 RF1.1 F1.1 B1.0 SB1.0 B1.1 SB1.1 U1.0
    """
    check(by_hand(legal, num_stages=2, num_microbatches=2))
    with pytest.raises(ScheduleError, match=r"coordinate 1 does .*microbatch 0' when .*microbatch 1' is next from"):
        check(by_hand(legal.replace("SF0.0 SF0.1", "SF0.1 SF0.0"), num_stages=2, num_microbatches=2))


def test_activations_and_gradients_of_a_link_keep_their_order() -> None:
    legal = """
        F0.0 SF0.0 RF3.0 F3.0 B3.0 SB3.0 F0.1 SF0.1 RB0.0 B0.0 RF3.1 F3.1 B3.1 SB3.1 RB0.1 B0.1 U0.0 U3.0
        RF1.0 F1.0 F2.0 SF2.0 RB2.0 B2.0 B1.0 SB1.0 RF1.1 F1.1 F2.1 SF2.1 RB2.1 B2.1 B1.1 SB1.1 U1.0 U2.0
    """
    check(by_hand(legal, num_stages=4, num_microbatches=2, placement="v"))
    overtaken = legal.replace("SB3.0 F0.1 SF0.1", "F0.1 SF0.1 SB3.0")
    with pytest.raises(ScheduleError, match=r"'receive_backward of stage 2, .* when 'receive_forward of stage 1, "):
        check(by_hand(overtaken, num_stages=4, num_microbatches=2, placement="v"))


def test_zero_bubble_halves_are_legal() -> None:
    schedule = check(by_hand(ZERO_BUBBLE, num_stages=2, num_microbatches=2))
    assert (
        most_in_flight(schedule, 0) == most_in_flight(schedule, 1) == 2
    )  # the weights' half still needs the activations


@quick
@given(small_schedules)
def test_every_schedule_may_put_weights_off_to_the_end(schedule: Schedule) -> None:
    rows = []
    for *work, update in schedule.actions:
        halved = [msgspec.structs.replace(a, kind="backward_inputs") if a.kind == "backward" else a for a in work]
        late = [msgspec.structs.replace(a, kind="backward_weights") for a in work if a.kind == "backward"]
        rows.append([*halved, *late, update])
    check(with_rows(schedule, rows))


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("W0.1", "", "backward_weights of stage 0, microbatch 1 is never done"),
        ("I0.1", "", "backward of stage 0, microbatch 1 is never done"),
        ("I0.1", "I0.1 B0.1", "backward of stage 0, microbatch 1 is not part of the work: remove it"),
        ("I1.0 SB1.0", "W1.0 I1.0 SB1.0", "backward_weights of stage 1, microbatch 0 is done 2 times"),
        ("W0.1 U0.0", "U0.0 W0.1", "waits in 'update of stage 0.* for 'backward_weights of stage 0, microbatch 1"),
        (
            "RB0.0 I0.0 RB0.1 I0.1 W0.0",
            "W0.0 RB0.0 I0.0 RB0.1 I0.1",
            "waits in 'backward_weights .* for 'backward_inputs",
        ),
    ],
)
def test_wrong_halves_are_refused(right: str, wrong: str, said: str) -> None:
    assert right in ZERO_BUBBLE
    with pytest.raises(ScheduleError, match=said):
        check(by_hand(ZERO_BUBBLE.replace(right, wrong), num_stages=2, num_microbatches=2))


def test_stages_lie_in_a_loop_or_a_v() -> None:
    v = by_hand(IN_A_V, num_stages=4, num_microbatches=1, placement="v")
    loop = msgspec.structs.replace(v, placement="loop")
    assert [v.coordinate_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert [loop.coordinate_of(stage) for stage in range(4)] == [0, 1, 0, 1]


def test_in_a_v_neighbours_on_one_coordinate_do_not_send() -> None:
    check(by_hand(IN_A_V, num_stages=4, num_microbatches=1, placement="v"))
    with_send = IN_A_V.replace("F2.0", "SF1.0 RF2.0 F2.0", 1)
    with pytest.raises(ScheduleError, match=r"of stage [12], microbatch 0 is not part of the work"):
        check(by_hand(with_send, num_stages=4, num_microbatches=1, placement="v"))


def test_in_a_v_the_turn_is_still_ordered() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        check(by_hand(IN_A_V.replace("B2.0 B1.0", "B1.0 B2.0"), num_stages=4, num_microbatches=1, placement="v"))


@pytest.mark.parametrize(
    "action", [Action("forward", 2, 0), Action("forward", 0, 3), Action("forward", -1, 0), Action("update", 0, 1)]
)
def test_work_outside_the_step_is_refused(action: Action) -> None:
    schedule = make_schedule("1f1b", 2, 3)
    rows = rows_of(schedule)
    rows[0].append(action)
    with pytest.raises(ScheduleError, match=f"^{action}"):
        check(with_rows(schedule, rows))


def test_stages_that_do_not_fill_the_coordinates_are_refused() -> None:
    three_on_two = """
        F0.0 SF0.0 RF2.0 F2.0 B2.0 SB2.0 U2.0 RB0.0 B0.0 U0.0
        RF1.0 F1.0 SF1.0 RB1.0 B1.0 SB1.0 U1.0
    """
    with pytest.raises(ScheduleError, match="3 stages"):
        check(by_hand(three_on_two, num_stages=3, num_microbatches=1))
    one_on_two = make_schedule("gpipe", 1, 2)
    with pytest.raises(ScheduleError, match="1 stage"):
        check(with_rows(one_on_two, [*one_on_two.actions, ()]))


@pytest.mark.parametrize("field", ["num_stages", "num_microbatches"])
def test_a_count_below_one_is_refused(field: str) -> None:
    with pytest.raises(ScheduleError, match=f"Schedule: {field}=0: "):
        msgspec.structs.replace(make_schedule("gpipe", 1, 1), **{field: 0})


@pytest.mark.parametrize("num_stages", [0, 2])
def test_a_schedule_without_coordinates_is_refused(num_stages: int) -> None:
    with pytest.raises(ScheduleError):
        check(by_hand("", num_stages=num_stages, num_microbatches=1))
