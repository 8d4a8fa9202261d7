"""Peak memory of one rank over a step, by category and by moment.

State: parameters, gradients, optimizer slots and master weights (rank_state.py).
Activations follow the passes of the rank's stages, one microbatch of each stage at a time          -> LiveActivations

    live(0)   = the activation from the previous stage   0 on the first stage; before backward, the gradient from the next stage
                                                         is added
    live(s+1) = live(s) + kept(s)                        of the microbatch that runs; a recomputed block keeps its output
    in use during s = state + held + live(s) + peak(s) + gathered parameters + buffers of the collectives that run then

held: activations of the other microbatches in flight. The fullest place of the schedule is looked for twice: before the first
backward of a step ends, when there are no gradients yet, and after it, when there are. With GPipe the first is by far the fuller.
The peak is the largest moment over all pp coordinates; the update of the optimizer is a moment too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.core.cluster import Device
from meshwright.core.estimate import MemoryParts
from meshwright.core.graph import Segment
from meshwright.core.pipeline.schedule import Action, Order
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.compute.recomputed_ops import ActivationMode
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.memory.footprint import Footprint, Footprints
from meshwright.cost.memory.rank_state import RankState
from meshwright.cost.passes import StagePasses, handed_on_bytes
from meshwright.rules.kinds import cached_in_value

PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Held:
    """The most bytes that other microbatches hold when a forward, or a backward, of a stage begins; None where none begins."""

    stage: int
    has_gradients: bool
    """Whether a microbatch has run backward before on this coordinate."""
    forward: float | None
    backward: float | None

    @property
    def most(self) -> float:
        return max(self.forward or 0.0, self.backward or 0.0)


class Moment(NamedTuple):
    """The memory in use at one moment of a step, and when that is."""

    coordinate: int
    when: str
    memory: MemoryParts
    segment: Segment | None = None
    """The pass that runs; None in an update, and while gradients are reduced."""


KnownMoments = dict[tuple[object, ...], Moment]
"""(work of a coordinate, bytes its microbatches hold) → its fullest moment."""


class LiveActivations:
    """Bytes that one microbatch has in use on a stage after each of its passes, and the part of them that is activations.

    in use        the bytes forward has kept, less the bytes backward has freed
    activations   the part of them that forward kept for blocks whose backward has not run; the gradient that backward hands on is
                  a temporary
    input         where a block does not need its input again, code outside the blocks frees it right after the block; a recomputed
                  block needs its input until its backward is done
    """

    def __init__(self, received: float) -> None:
        self.in_use = received
        self.cached = 0.0
        """Copies of weights that autocast keeps until forward ends."""
        self._kept = {"received": received}
        self._late: dict[str, float] = {}

    @property
    def activations(self) -> float:
        return max(0.0, min(sum(self._kept.values()), self.in_use))

    def forward(self, block: str, footprint: Footprint, behind: str, *, keeps_input: bool) -> None:
        """After a forward pass. behind: the last named block, whose input a pass outside the blocks may free."""
        freed_outside = footprint.freed_outside
        change = footprint.kept
        if freed_outside and keeps_input:
            self._late[behind] = self._late.get(behind, 0.0) + freed_outside
            change, freed_outside = change + freed_outside, 0.0
        self.in_use += change
        self.cached += footprint.cached
        self._book(block, change + freed_outside)
        self._book(behind, -freed_outside)

    def returned(self, num_bytes: float) -> None:
        """When the gradient from the next stage has arrived."""
        self.in_use += num_bytes
        self._book("returned", num_bytes)

    def backward(self, block: str, footprint: Footprint) -> None:
        """After a backward pass."""
        self.in_use += footprint.kept - self._late.pop(block, 0.0)
        self._kept.pop(block, None)

    def _book(self, block: str, num_bytes: float) -> None:
        self._kept[block] = self._kept.get(block, 0.0) + num_bytes


class MemoryCost:
    """Follows the memory of every pp coordinate of a plan through a step."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        local_blocks: dict[str, LocalBlock],
        stages: tuple[StagePasses, ...],
        rank_state: Callable[[int], RankState],
        like: Footprints | None = None,
        modes: dict[str, ActivationMode] | None = None,
        known_moments: KnownMoments | None = None,
    ) -> None:
        """like: footprints of a plan with the same microbatch, sharding and compile setting. modes: as in Footprints.
        known_moments: fullest moments of plans that differ in their recompute only."""
        self.plan, self.recipe = plan, recipe
        self.local_blocks, self.stages, self.rank_state = local_blocks, stages, rank_state
        self.footprints = Footprints(plan, recipe, like, modes)
        self._held_by_row: dict[int, tuple[Held, ...]] = {}
        self._peaks: dict[int, tuple[object, Moment]] = {}
        """Coordinate → (its row of actions, its fullest moment)."""
        self._known_moments: KnownMoments = {} if known_moments is None else known_moments

    def worst(self, order: Order, device: Device) -> Moment:
        """The fullest moment of the fullest coordinate."""
        peaks = (self.peak(coordinate, order, device) for coordinate in self._distinct_coordinates(order))
        return max(peaks, key=lambda moment: moment.memory.total)

    def _distinct_coordinates(self, order: Order) -> list[int]:
        """Among coordinates with the same work, the ones whose microbatches hold most, before there are gradients and after."""
        fullest: dict[tuple[object, ...], tuple[float, int]] = {}
        for coordinate, row in enumerate(order):
            work = self._work(dict.fromkeys(action.stage for action in row))
            for has_gradients in (False, True):
                held = max((one.most for one in self._held(row) if one.has_gradients == has_gradients), default=0.0)
                key = (work, has_gradients)
                if key not in fullest or held > fullest[key][0]:
                    fullest[key] = (held, coordinate)
        return list(dict.fromkeys(coordinate for _, coordinate in fullest.values()))

    def peaks(self, order: Order, device: Device) -> list[Moment]:
        """The fullest moment of every coordinate; coordinates that do the same work and hold the same bytes are computed once."""
        known, found = self._known_moments, []
        for coordinate, row in enumerate(order):
            held = self._held(row)
            sizes = tuple((one.has_gradients, one.forward, one.backward) for one in held)
            key = (self._work(dict.fromkeys(one.stage for one in held)), sizes)
            if key not in known:
                known[key] = self.peak(coordinate, order, device)
            found.append(known[key])
        return found

    def _work(self, stages: Collection[int]) -> tuple[object, ...]:
        """A key for the passes of some stages: blocks of one kind under one mode are equal. The ends hold the batch."""
        passes = tuple(
            (id(self.local_blocks[s.block]), self.footprints.modes.get(s.block))
            for stage in stages
            for s in self.stages[stage].forward
        )
        return passes, 0 in stages, len(self.stages) - 1 in stages

    def peak(self, coordinate: int, order: Order, device: Device) -> Moment:
        """The fullest moment of one coordinate; computed once for each row of an order."""
        row, known = order[coordinate], self._peaks.get(coordinate)
        if known is None or known[0] is not row:
            fullest = max(self.moments(coordinate, order, device), key=lambda moment: moment.memory.total)
            known = self._peaks[coordinate] = (row, fullest)
        return known[1]

    def moments(self, coordinate: int, order: Order, device: Device) -> Iterator[Moment]:
        """Memory in every pass of a microbatch on one coordinate, and in the update."""
        rank_state = self.rank_state(coordinate)
        at_first = rank_state.before_any_backward()
        for held in self._held(order[coordinate]):
            yield from self._walk(held, rank_state if held.has_gradients else at_first, device)
        yield Moment(coordinate, "update", rank_state.during_update(device))

    def through_stage(
        self, stage: int, held: float, rank_state: RankState, device: Device
    ) -> tuple[list[Moment], list[Moment]]:
        """The moments of one microbatch in forward and in backward of a stage, while other microbatches hold `held` bytes."""
        moments = list(self._walk(Held(stage, rank_state.accumulates, held, held), rank_state, device))
        turn = len(self.stages[stage].forward)
        return moments[:turn], moments[turn:]

    def _held(self, row: tuple[Action, ...]) -> tuple[Held, ...]:
        """For each stage of a coordinate, before there are gradients and after."""
        if id(row) not in self._held_by_row:
            self._held_by_row[id(row)] = tuple(self._walk_held(row))
        return self._held_by_row[id(row)]

    def _walk_held(self, row: tuple[Action, ...]) -> Iterator[Held]:
        kept = {stage: self.stage_kept(stage) for stage in dict.fromkeys(action.stage for action in row)}
        most: dict[tuple[int, bool, str], float] = {}
        held, has_gradients = 0.0, False
        for action in row:
            kind, stage = action.kind, action.stage
            others = held if kind == "forward" else held - kept[stage]
            place = (stage, has_gradients, "forward" if kind == "forward" else "backward")
            most[place] = max(most.get(place, 0.0), others)
            has_gradients = has_gradients or kind != "forward"
            if kind == "forward":
                held += kept[stage]
            elif kind in ("backward", "backward_weights"):
                held -= kept[stage]
        for stage in kept:
            forward, backward = ([most.get((stage, after, phase)) for after in (False, True)] for phase in PHASES)
            first = Held(stage, False, _fuller(*forward), _fuller(*backward))
            later = Held(stage, True, forward[1], backward[1])
            yield from (held for held in (first, later) if held.forward is not None or held.backward is not None)

    @cached_in_value
    def stage_kept(self, number: int) -> float:
        """Bytes that one microbatch keeps on a stage between its forward and its backward, its received activation included."""
        live = LiveActivations(self._received(number))
        for segment, behind in self._forward(number):
            live.forward(segment.block, self._footprint(segment), behind, keeps_input=self._keeps_input(behind))
        return live.in_use

    def own_kept(self, number: int) -> float:
        """The same without the activation it received."""
        return self.stage_kept(number) - self._received(number)

    def begin_of_backward(self, number: int) -> Footprint:
        """The first backward pass of a stage: its peak is above all that is kept when it begins."""
        first = self.stages[number].backward[:1]
        return self._footprint(first[0]) if first else Footprint(0.0, 0.0)

    def _forward(self, number: int) -> Iterator[tuple[Segment, str]]:
        """The forward passes of a stage, each with the last named block up to it."""
        behind = ""
        for segment in self.stages[number].forward:
            behind = segment.block or behind
            yield segment, behind

    def _keeps_input(self, block: str) -> bool:
        return self.footprints.modes.get(block) in ("full", "selective ops")

    def _received(self, number: int) -> float:
        """Bytes of the activation from the previous stage: no pass of this stage allocates it, though one frees it."""
        copies = 2 if self.recipe.system.copies_received else 1
        return copies * self._sent(number - 1) if number else 0.0

    def _sent(self, number: int) -> float:
        """Bytes a stage sends to the next, and of their gradient; between stages on one coordinate nothing is in memory twice."""
        stages = self.plan.stages
        if number + 1 == len(stages) or stages[number].coordinate == stages[number + 1].coordinate:
            return 0.0
        return handed_on_bytes(self.stages[number], self.local_blocks, self.plan.microbatch)

    def _footprint(self, segment: Segment) -> Footprint:
        return self.footprints.of(self.local_blocks[segment.block], segment.block, segment.number)

    def _walk(self, held: Held, rank_state: RankState, device: Device) -> Iterator[Moment]:
        """One microbatch through a stage."""
        coordinate = self.plan.stages[held.stage].coordinate
        live = LiveActivations(self._received(held.stage))
        for segment, behind in self._forward(held.stage):
            footprint = self._footprint(segment)
            if held.forward is not None:
                before = held.forward + live.in_use + live.cached
                parts = rank_state.during(
                    "forward", segment.block, set(), activations=before, temporaries=footprint.peak
                )
                yield Moment(coordinate, f"forward of {_words(segment)}", parts, segment)
            live.forward(segment.block, footprint, behind, keeps_input=self._keeps_input(behind))
        if held.backward is not None:
            yield from self._walk_backward(held.stage, held.backward, live, rank_state, device)

    def _walk_backward(
        self, stage: int, held: float, live: LiveActivations, rank_state: RankState, device: Device
    ) -> Iterator[Moment]:
        coordinate = self.plan.stages[stage].coordinate
        live.returned(self._sent(stage))
        done: set[str] = set()
        for segment in self.stages[stage].backward:
            footprint, block = self._footprint(segment), segment.block
            done.add(block)
            mine = live.activations + footprint.rebuilt
            inside = live.in_use + footprint.peak - mine
            sizes = {"activations": held + mine, "temporaries": inside}
            parts = rank_state.during(
                "backward", block, done, pending_gradient_share=footprint.pending_gradient_share, **sizes
            )
            yield Moment(coordinate, f"backward of {_words(segment)}", parts, segment)
            live.backward(block, footprint)
            if rank_state.reduces and block:
                sizes = {"activations": held + live.activations, "temporaries": live.in_use - live.activations}
                yield Moment(
                    coordinate, f"reduction of {block}", rank_state.during_reduction(block, done, device, **sizes)
                )


def _fuller(first: float | None, later: float | None) -> float | None:
    """The bytes held before there are gradients, where they are more than the bytes held after; otherwise None."""
    return None if first is None or (later is not None and first <= later) else first


def _words(segment: Segment) -> str:
    return segment.block or "what is outside the blocks"
