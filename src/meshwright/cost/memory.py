"""Peak memory of one rank over a step, by category and by moment.

State (elements e, N ranks that share it, bytes by item): parameters, gradients, optimizer slots and master copies.
The rest follows the passes of the rank's stages, one microbatch of each at a time:

    live(0)   = what the stage before sent          nothing on the first stage; before backward the gradient that the stage
                                                   behind sent comes to it
    live(s+1) = live(s) + kept(s)                  activations of the microbatch at hand; a recomputed block keeps its output
    in use during s = state + held + live(s) + peak(s) + gathered parameters + buffers of the collectives that run then

held: what the other microbatches in flight keep, at the fullest place of the schedule. The peak is the largest moment over
all pp coordinates; the update of the optimizer is a moment too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from meshwright.core.cluster import Device
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import Segment
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.schedule import Action, Order
from meshwright.cost.division import Division
from meshwright.cost.footprint import Footprint, Footprints
from meshwright.cost.holdings import Holdings
from meshwright.cost.ledger import Ledger
from meshwright.cost.passes import StagePasses, handed_on_bytes
from meshwright.cost.redone import Mode


@dataclass(frozen=True)
class Moment:
    """What is in use at one time of a step, and when that is."""

    coordinate: int
    when: str
    memory: MemoryParts
    segment: Segment | None = None
    """The pass it is in; None in an update, and while gradients are reduced."""


class MemoryCost:
    """Walks the memory of every pp coordinate of a plan."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        divisions: dict[str, Division],
        stages: tuple[StagePasses, ...],
        holdings: Callable[[int], Holdings],
        like: Footprints | None = None,
        modes: dict[str, Mode] | None = None,
    ) -> None:
        """like: those of a plan with the same microbatch, divided and compiled alike. modes: as in Footprints."""
        self.plan, self.recipe = plan, recipe
        self.divisions, self.stages, self.holdings = divisions, stages, holdings
        self.footprints = Footprints(plan, recipe, like, modes)
        self._kept: dict[int, float] = {}
        self._held_by_row: dict[int, tuple[tuple[int, float, float], ...]] = {}

    def worst(self, order: Order, device: Device) -> Moment:
        """The fullest moment of the fullest coordinate."""
        peaks = (self.peak(coordinate, order, device) for coordinate in self._unlike(order))
        return max(peaks, key=lambda moment: moment.memory.total)

    def _unlike(self, order: Order) -> list[int]:
        """Of coordinates with the same work, the one whose microbatches hold most."""
        fullest: dict[tuple[object, ...], tuple[float, int]] = {}
        for coordinate, row in enumerate(order):
            stages = dict.fromkeys(action.stage for action in row)
            work = self._work(stages)
            held = max(max(forward, backward) for _, forward, backward in self._held(row))
            key = (work, 0 in stages, len(self.stages) - 1 in stages)  # the ends hold the batch
            if key not in fullest or held > fullest[key][0]:
                fullest[key] = (held, coordinate)
        return [coordinate for _, coordinate in fullest.values()]

    def peaks(self, order: Order, device: Device) -> list[Moment]:
        """The fullest moment of every coordinate; those with the same work and as much held are walked once."""
        known: dict[tuple[object, ...], Moment] = {}
        found = []
        for coordinate, row in enumerate(order):
            held = self._held(row)
            stages = [stage for stage, _, _ in held]
            sizes = tuple((forward, backward) for _, forward, backward in held)
            key = (self._work(stages), sizes, 0 in stages, len(self.stages) - 1 in stages)
            if key not in known:
                known[key] = self.peak(coordinate, order, device)
            found.append(known[key])
        return found

    def _work(self, stages: Iterable[int]) -> tuple[object, ...]:
        """What the passes of some stages are: blocks of one kind under one mode are alike."""
        return tuple(
            (id(self.divisions[s.block]), self.footprints.modes.get(s.block))
            for stage in stages
            for s in self.stages[stage].forward
        )

    def peak(self, coordinate: int, order: Order, device: Device) -> Moment:
        return max(self.moments(coordinate, order, device), key=lambda moment: moment.memory.total)

    def moments(self, coordinate: int, order: Order, device: Device) -> Iterator[Moment]:
        """Memory in every pass of a microbatch on one coordinate, and in the update."""
        holdings = self.holdings(coordinate)
        for stage, held_forward, held_backward in self._held(order[coordinate]):
            yield from self._walk(stage, (held_forward, held_backward), holdings, device)
        yield Moment(coordinate, "update", holdings.during_update(device))

    def through_stage(
        self, stage: int, held: float, holdings: Holdings, device: Device
    ) -> tuple[list[Moment], list[Moment]]:
        """One microbatch through a stage, forward and backward, where other microbatches hold so many bytes."""
        moments = list(self._walk(stage, (held, held), holdings, device))
        turn = len(self.stages[stage].forward)
        return moments[:turn], moments[turn:]

    def _held(self, row: tuple[Action, ...]) -> tuple[tuple[int, float, float], ...]:
        """For each stage of a coordinate: the most that other microbatches hold when a forward, or a backward, begins."""
        key = id(row)
        if key not in self._held_by_row:
            self._held_by_row[key] = tuple(self._walk_held(row))
        return self._held_by_row[key]

    def _walk_held(self, row: tuple[Action, ...]) -> Iterator[tuple[int, float, float]]:
        kept = {stage: self.stage_kept(stage) for stage in dict.fromkeys(action.stage for action in row)}
        most: dict[tuple[int, str], float] = {}
        held = 0.0
        for action in row:
            kind, stage = action.kind, action.stage
            if kind == "forward":
                most[stage, "forward"] = max(most.get((stage, "forward"), 0.0), held)
                held += kept[stage]
            elif kind in ("backward", "backward_weights"):
                held -= kept[stage]
                most[stage, "backward"] = max(most.get((stage, "backward"), 0.0), held)
            else:
                most[stage, "backward"] = max(most.get((stage, "backward"), 0.0), held - kept[stage])
        for stage in kept:
            yield stage, most.get((stage, "forward"), 0.0), most.get((stage, "backward"), 0.0)

    def stage_kept(self, number: int) -> float:
        """By one microbatch on a stage, between its forward and its backward: what it received is kept too."""
        if number not in self._kept:
            self._kept[number] = self._walk_kept(number)
        return self._kept[number]

    def _walk_kept(self, number: int) -> float:
        ledger = Ledger(self._received(number))
        for segment, behind in self._forward(number):
            ledger.forward(segment.block, self._footprint(segment), behind, keeps_input=self._keeps_input(behind))
        return ledger.live

    def own_kept(self, number: int) -> float:
        """The same without what it received."""
        return self.stage_kept(number) - self._received(number)

    def room_of(self, number: int) -> float:
        """What the backward passes of a stage need for a moment, above all that is kept when they begin."""
        return max((self._footprint(segment).peak for segment in self.stages[number].backward[:1]), default=0.0)

    def _forward(self, number: int) -> Iterator[tuple[Segment, str]]:
        """The forward passes of a stage, each with the last named block up to it."""
        behind = ""
        for segment in self.stages[number].forward:
            behind = segment.block or behind
            yield segment, behind

    def _keeps_input(self, block: str) -> bool:
        return self.footprints.modes.get(block) in ("full", "selective ops")

    def _received(self, number: int) -> float:
        """What the stage before sent: no pass of this stage takes it, though one gives it back."""
        if number == 0 or self._same_coordinate(number - 1):
            return 0.0
        copies = 2 if self.recipe.copies_received else 1
        return copies * handed_on_bytes(self.stages[number - 1], self.divisions, self.plan.microbatch)

    def _returned(self, number: int) -> float:
        """The gradient that the stage behind sends: as large as what it was sent."""
        if number + 1 == len(self.stages) or self._same_coordinate(number):
            return 0.0
        return handed_on_bytes(self.stages[number], self.divisions, self.plan.microbatch)

    def _same_coordinate(self, number: int) -> bool:
        """Whether a stage and the next share a coordinate: then they share the tensor between them too."""
        stages = self.plan.stages
        return stages[number].coordinate == stages[number + 1].coordinate

    def _footprint(self, segment: Segment) -> Footprint:
        return self.footprints.of(self.divisions[segment.block], segment.block, segment.number)

    def _walk(self, stage: int, held: tuple[float, float], holdings: Holdings, device: Device) -> Iterator[Moment]:
        """One microbatch through a stage; `held`: what the others hold when a forward, or a backward, begins."""
        coordinate = self.plan.stages[stage].coordinate
        ledger = Ledger(self._received(stage))
        for segment, behind in self._forward(stage):
            footprint = self._footprint(segment)
            before = held[0] + ledger.live + ledger.cached
            parts = holdings.during("forward", segment.block, set(), activations=before, temporaries=footprint.peak)
            yield Moment(coordinate, f"forward of {_words(segment)}", parts, segment)
            ledger.forward(segment.block, footprint, behind, keeps_input=self._keeps_input(behind))
        ledger.returned(self._returned(stage))
        done: set[str] = set()
        for segment in self.stages[stage].backward:
            footprint, block = self._footprint(segment), segment.block
            done.add(block)
            mine = ledger.activations + footprint.rebuilt
            inside = ledger.live + footprint.peak - mine
            sizes = {"activations": held[1] + mine, "temporaries": inside}
            parts = holdings.during("backward", block, done, unborn=footprint.unborn, **sizes)
            yield Moment(coordinate, f"backward of {_words(segment)}", parts, segment)
            ledger.backward(block, footprint)
            if holdings.packs and block:
                sizes = {"activations": held[1] + ledger.activations, "temporaries": ledger.live - ledger.activations}
                yield Moment(coordinate, f"reduction of {block}", holdings.while_reducing(block, done, device, **sizes))


def _words(segment: Segment) -> str:
    return segment.block or "what is outside the blocks"
