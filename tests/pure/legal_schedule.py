"""Proof that a schedule is legal: each unit of work once, on its coordinate, after what it needs, and no deadlock.

    every coordinate has as many stages                                         -> _check_shape
    every action is on the coordinate of its stage                              -> _check_places
    every unit of work is there, once, and nothing else                         -> _check_once
    played in order, every coordinate reaches its end                           -> _check_runs
    the receives of each link come in the order of its sends                    -> _check_links

A backward is whole or in halves, for each stage and microbatch on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.core.errors import ScheduleError
from meshwright.core.pipeline.schedule import Action, Schedule


def check(schedule: Schedule) -> Schedule:
    """The schedule itself, if it is legal."""
    _check_shape(schedule)
    _check_places(schedule)
    planned = _check_once(schedule)
    _check_runs(schedule, planned)
    _check_links(schedule)
    return schedule


def most_in_flight(schedule: Schedule, coordinate: int) -> int:
    """The most activations a coordinate holds at once, counted in microbatches of one of its stages."""
    held = most = 0
    for action in schedule.actions[coordinate]:
        held += {"forward": 1, "backward": -1, "backward_weights": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def _check_shape(schedule: Schedule) -> None:
    """Every coordinate has the same number of stages, at least one."""
    num_stages, num_coordinates = schedule.num_stages, schedule.num_coordinates
    if num_coordinates == 0:
        raise ScheduleError("a schedule has no coordinates: give one list of actions per pp coordinate")
    if num_stages % num_coordinates:
        raise ScheduleError(
            f"{num_stages} stages do not fill {num_coordinates} coordinates: give a multiple of {num_coordinates}"
        )


def _check_places(schedule: Schedule) -> None:
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    for coordinate, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.stage < num_stages or not 0 <= action.microbatch < num_microbatches:
                raise ScheduleError(f"{action}: there are {num_stages} stages, {num_microbatches} microbatches")
            home = schedule.coordinate_of(action.stage)
            if home != coordinate:
                raise ScheduleError(f"{action} is on coordinate {coordinate}, not {home}")


def _check_once(schedule: Schedule) -> frozenset[Action]:
    counts = Counter(action for actions in schedule.actions for action in actions)
    planned = frozenset(counts)
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(f"{action} is done {count} times")
    required = frozenset(_required(schedule, planned))
    for action in sorted(required - planned, key=str):
        raise ScheduleError(f"{action} is never done")
    for action in sorted(planned - required, key=str):
        raise ScheduleError(f"{action} is not part of the work: remove it")
    return planned


def _required(schedule: Schedule, planned: frozenset[Action]) -> Iterator[Action]:
    for stage in range(schedule.num_stages):
        yield Action("update", stage, 0)
        for microbatch in range(schedule.num_microbatches):
            yield Action("forward", stage, microbatch)
            yield from _backward_parts(stage, microbatch, planned)
            if stage + 1 < schedule.num_stages and _crosses(schedule, stage):
                yield Action("send_forward", stage, microbatch)
                yield Action("receive_forward", stage + 1, microbatch)
                yield Action("send_backward", stage + 1, microbatch)
                yield Action("receive_backward", stage, microbatch)


def _backward_parts(stage: int, microbatch: int, planned: frozenset[Action]) -> tuple[Action, ...]:
    """A backward is planned whole, or in halves: inputs first, weights later."""
    halves = (Action("backward_inputs", stage, microbatch), Action("backward_weights", stage, microbatch))
    return halves if halves[0] in planned else (Action("backward", stage, microbatch),)


def _crosses(schedule: Schedule, stage: int) -> bool:
    """Whether the next stage lives on another coordinate."""
    return schedule.coordinate_of(stage) != schedule.coordinate_of(stage + 1)


def _check_runs(schedule: Schedule, planned: frozenset[Action]) -> None:
    """Play it: each coordinate does its next action as soon as what it needs is done; all must reach the end."""
    done = _play(schedule, planned)
    home = schedule.coordinate_of
    stuck = [next((action for action in actions if action not in done), None) for actions in schedule.actions]
    waits = [(a, need) for a in stuck if a for need in _needs(schedule, planned, a) if need not in done]
    for_itself = [(action, need) for action, need in waits if home(action.stage) == home(need.stage)]
    for action, need in (for_itself or waits)[:1]:  # who waits for itself holds up the others
        raise ScheduleError(f"deadlock: coordinate {home(action.stage)} waits in '{action}' for '{need}'")


def _play(schedule: Schedule, planned: frozenset[Action]) -> set[Action]:
    """Everything that can be done."""
    done: set[Action] = set()
    position = [0] * schedule.num_coordinates
    progress = True
    while progress:
        progress = False
        for coordinate, actions in enumerate(schedule.actions):
            while position[coordinate] < len(actions):
                action = actions[position[coordinate]]
                if not done.issuperset(_needs(schedule, planned, action)):
                    break
                done.add(action)
                position[coordinate] += 1
                progress = True
    return done


def _check_links(schedule: Schedule) -> None:
    """On each link the receives come in the order of the sends."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for action in (action for actions in schedule.actions for action in actions):
        if action.kind.startswith("send"):
            receive = _receive_of(action)
            sent.setdefault(_link(schedule, receive), []).append(receive)
        elif action.kind.startswith("receive"):
            received.setdefault(_link(schedule, action), []).append(action)
    for (source, target), expected in sent.items():
        for due, action in zip(expected, received[source, target], strict=True):
            if action != due:
                raise ScheduleError(
                    f"coordinate {target} does '{action}' when '{due}' is next from coordinate {source}: "
                    "receive in the order of the sends"
                )


def _receive_of(send: Action) -> Action:
    if send.kind == "send_forward":
        return Action("receive_forward", send.stage + 1, send.microbatch)
    return Action("receive_backward", send.stage - 1, send.microbatch)


def _link(schedule: Schedule, receive: Action) -> tuple[int, int]:
    """The coordinates a message comes from and goes to."""
    source = receive.stage - 1 if receive.kind == "receive_forward" else receive.stage + 1
    return schedule.coordinate_of(source), schedule.coordinate_of(receive.stage)


def _needs(schedule: Schedule, planned: frozenset[Action], action: Action) -> list[Action]:
    """What must be done before an action can start."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case "forward":
            return _source(schedule, stage, microbatch)
        case "backward" | "backward_inputs":
            return [Action("forward", stage, microbatch), *_gradient_source(schedule, planned, stage, microbatch)]
        case "backward_weights":
            return [Action("backward_inputs", stage, microbatch)]
        case "send_forward":
            return [Action("forward", stage, microbatch)]
        case "receive_forward":
            return [Action("send_forward", stage - 1, microbatch)]
        case "send_backward":
            return [_backward_parts(stage, microbatch, planned)[0]]
        case "receive_backward":
            return [Action("send_backward", stage + 1, microbatch)]
        case "update":
            every = range(schedule.num_microbatches)
            return [part for microbatch in every for part in _backward_parts(stage, microbatch, planned)]


def _source(schedule: Schedule, stage: int, microbatch: int) -> list[Action]:
    if stage == 0:
        return []
    if _crosses(schedule, stage - 1):
        return [Action("receive_forward", stage, microbatch)]
    return [Action("forward", stage - 1, microbatch)]


def _gradient_source(schedule: Schedule, planned: frozenset[Action], stage: int, microbatch: int) -> list[Action]:
    if stage + 1 == schedule.num_stages:
        return []
    if _crosses(schedule, stage):
        return [Action("receive_backward", stage, microbatch)]
    return [_backward_parts(stage + 1, microbatch, planned)[0]]
