"""Walking the memory of a schedule: what each coordinate holds of activations, action by action.

    forward            + kept
    backward           - kept
    backward_inputs    - freed_by_inputs
    backward_weights   - (kept - freed_by_inputs)
    peak               = max over actions of what is held before it + the fullest moment inside it

A coordinate takes and gives memory in the order of its own work, so time does not matter. What arrives early and waits
for its turn is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.codec import Value
from meshwright.core.pipeline.schedule import Action, ActionKind, Order


class StageBytes(Value, kw_only=True):
    """What one microbatch holds on one stage."""

    kept: float
    """By a forward, until the backward is done."""
    freed_by_inputs: float = 0.0
    """Of `kept`, what a backward for inputs gives back; the backward for weights gives back the rest."""
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    """At the fullest moment of a forward, or of any backward, above what was held when it began."""


class MemoryPeak(Value, kw_only=True):
    """The fullest moment of one coordinate."""

    peak_bytes: float
    place: int
    """Which of the coordinate's actions it is in: the first, where several are as full."""
    action: Action
    in_flight: dict[int, int]
    """Microbatches each of its stages holds in that action."""


def memory_peaks(order: Order, stages: Sequence[StageBytes]) -> tuple[MemoryPeak, ...]:
    """The fullest moment of every coordinate; `stages` has one entry a stage."""
    return tuple(_peak(row, stages) for row in order)


def in_flight_by_stage(order: Order) -> tuple[int, ...]:
    """The most microbatches each stage holds at once, its backward for weights included."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in (action for row in order for action in row):
        held[action.stage] = held.get(action.stage, 0) + _taken(action.kind)
        most[action.stage] = max(most.get(action.stage, 0), held[action.stage])
    return tuple(most[stage] for stage in sorted(most))


def _peak(row: tuple[Action, ...], stages: Sequence[StageBytes]) -> MemoryPeak:
    deltas = {stage: _deltas(stages[stage]) for stage in {action.stage for action in row}}
    held, best, best_place = 0.0, -1.0, 0
    for place, action in enumerate(row):
        change, inside = deltas[action.stage][action.kind]
        if held + inside > best:
            best, best_place = held + inside, place
        held += change
    return MemoryPeak(
        peak_bytes=best, place=best_place, action=row[best_place], in_flight=_in_flight(row, best_place, list(deltas))
    )


def _deltas(stage: StageBytes) -> dict[str, tuple[float, float]]:
    """By kind: what is held more afterwards, and the fullest moment above the beginning."""
    rest = stage.kept - stage.freed_by_inputs
    return {
        "forward": (stage.kept, max(stage.kept, stage.forward_peak)),
        "backward": (-stage.kept, stage.backward_peak),
        "backward_inputs": (-stage.freed_by_inputs, stage.backward_peak),
        "backward_weights": (-rest, stage.backward_peak),
    }


def _in_flight(row: tuple[Action, ...], place: int, stages: list[int]) -> dict[int, int]:
    """What is held inside an action: its own forward is counted, its own backward not yet taken off."""
    counts = dict.fromkeys(sorted(stages), 0)
    for action in row[:place]:
        counts[action.stage] += _taken(action.kind)
    counts[row[place].stage] += row[place].kind == "forward"
    return counts


def _taken(kind: ActionKind) -> int:
    """Microbatches in flight more after an action of this kind."""
    return {"forward": 1, "backward": -1, "backward_weights": -1}.get(kind, 0)
