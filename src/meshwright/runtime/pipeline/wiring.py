"""A Wiring: how one forward goes over the stages, learned once for each kind of microbatch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from meshwright.core.errors import PlanError
from meshwright.models.steps import Answer, Steps
from meshwright.rules.stages import Cuts, crossings, stages_of_events


@dataclass(frozen=True)
class Event:
    """One event of the program, as every stage meets it."""

    name: str
    """Of the block, or of the function outside all blocks."""
    stage: int
    makes: tuple[int, ...]
    answer: Answer | None = None
    """Of a block."""


@dataclass(frozen=True)
class Wiring:
    events: tuple[Event, ...]
    cuts: Cuts
    needs_gradient: frozenset[int]
    parameters: dict[str, int]
    num_stages: int
    first_versions: dict[int, int]
    """Of tensors that are changed in place."""
    signature: Hashable
    """The kind of microbatch it is for."""

    @cached_property
    def last_events(self) -> tuple[int, ...]:
        """For every stage the place of its last event; -1 where it has none."""
        places = [-1] * self.num_stages
        for place, event in enumerate(self.events):
            places[event.stage] = place
        return tuple(places)

    def received(self, stage: int) -> tuple[int, ...]:
        return self.cuts[stage - 1] if stage else ()

    def versions(self, number: int) -> list[int]:
        """All numbers of a tensor that is changed in place: one object goes by them."""
        first = self.first_versions.get(number, number)
        return [first, *(other for other, origin in self.first_versions.items() if origin == first)]

    def sent(self, stage: int) -> tuple[int, ...]:
        return self.cuts[stage] if stage < len(self.cuts) else ()


def lay_out(steps: Steps, stage_of: dict[str, int], num_stages: int, signature: Hashable) -> Wiring:
    """The events on the plan's stages; refuses what cannot be cut."""
    stages = stages_of_events(steps.flow, stage_of, num_stages)
    cuts = crossings(steps.flow, stages, num_stages)
    _check_versions(steps, cuts)
    first = len(steps.flow.events) - len(steps.names)
    rows = zip(steps.names, stages[first:], steps.flow.events[first:], steps.answers, strict=True)
    return Wiring(
        events=tuple(Event(name, stage, event.makes, answer) for name, stage, event, answer in rows),
        cuts=cuts,
        needs_gradient=frozenset(n for n, tensor in enumerate(steps.flow.tensors) if tensor.needs_gradient),
        parameters=steps.parameters,
        num_stages=num_stages,
        first_versions=steps.first_versions,
        signature=signature,
    )


def _check_versions(steps: Steps, cuts: Cuts) -> None:
    for cut in cuts:
        firsts = [steps.first_versions.get(number, number) for number in cut]
        twice = next((first for first in firsts if firsts.count(first) > 1), None)
        if twice is not None:
            maker = next((event.block for event in steps.flow.events if twice in event.makes), "")
            raise PlanError(
                f"the model cannot be cut after block '{maker}': a later stage needs its result both before and after it is "
                "changed in place; change a copy of it"
            )
