"""Memory one pass of a block takes and gives back on one rank, with recompute and compile.

plain       the events of the pass, each tensor as large as its share on this rank
recompute   forward keeps the block's output and what is not redone; backward first rebuilds the rest
fused       results that stay inside fused groups take nothing; what backward needs of them it computes again
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.core.graph import Kind, Pass, Source
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.compute.fusion import Fused, is_fused
from meshwright.cost.compute.recomputed_ops import (
    Mode,
    dropped_ops,
    kept_for_core,
    memory_modes_of,
    read_behind,
    redone_ops,
)
from meshwright.cost.local_block import Division
from meshwright.cost.memory.gradient_liveness import Births
from meshwright.rules.labels import weight_copies


@dataclass(frozen=True)
class Footprint:
    """Bytes above the beginning of a pass: when it ends, and at its fullest."""

    kept: float
    peak: float
    rebuilt: float = 0.0
    """Of the peak, what a recompute brings back."""
    unborn: float = 0.0
    """At its fullest, the share of the gradients of the block's parameters that is not made yet."""
    given_back: float = 0.0
    """Of other blocks' results, what a forward pass outside the blocks gives back."""
    cached: float = 0.0
    """What autocast keeps beside it until forward ends: its copies of weights, though the block is recomputed."""


class Step(NamedTuple):
    """Memory taken or given back in a pass, on one rank, as the samples make it."""

    fixed: float
    per_sample: float
    share: float
    """Of it, what one rank has."""
    maker: int | None
    """The op whose result it is, where it is of this block."""
    born: float
    """Of the gradients of the block's parameters, the share that is made before that op."""
    not_kept: bool
    given_late: bool
    """Whether it is given back when the pass ends, and not before."""


class Steps(NamedTuple):
    taken: tuple[Step, ...]
    gradient_bytes: float
    unborn: float
    """Of those, the share that is not made when the pass begins."""
    passes_on: bool
    """Whether some op holds messages beside its tensors."""


class Footprints:
    """Looks up passes for one plan; each is walked once."""

    def __init__(
        self, plan: Plan, recipe: Recipe, like: Footprints | None = None, modes: dict[str, Mode] | None = None
    ) -> None:
        """like: of a plan with the same microbatch, divided and compiled alike; what it has walked is taken from it.

        modes: how blocks are recomputed, if not as the plan says.
        """
        self.plan, self.recipe = plan, recipe
        self.samples = plan.microbatch
        self.modes = memory_modes_of(plan, recipe) if modes is None else modes
        self._known: dict[tuple[int, int, str], Footprint] = like._known if like else {}
        self._walked: dict[tuple[int, int], tuple[float, float, float]] = like._walked if like else {}
        self._fused: dict[int, Fused | None] = like._fused if like else {}
        self._outputs: dict[int, frozenset[int]] = like._outputs if like else {}

    def of(self, division: Division, block: str, number: int) -> Footprint:
        mode = self.modes.get(block, "none")
        key = (id(division), number, mode)
        if key not in self._known:
            if id(division) not in self._fused:
                fused = is_fused(block, self.plan, self.recipe)
                self._fused[id(division)] = division.fused if fused else None
            found = self._walk(division, number, mode)
            self._known[key] = found if block else replace(found, given_back=self._given_back(division, number))
        return self._known[key]

    def _given_back(self, division: Division, number: int) -> float:
        one = division.kind.passes[number]
        if one.phase == "backward":
            return 0.0
        sizes = (event.num_bytes.at(self.samples) for event in one.events if event.source == "@input")
        return -sum(min(0.0, size) for size in sizes) * division.result_share("@input")

    def _walk(self, division: Division, number: int, mode: Mode) -> Footprint:
        one = division.kind.passes[number]
        kept, peak, unborn = self._levels(division, number)
        if mode == "none":
            return Footprint(kept, peak, unborn=unborn)
        forward = number if one.phase == "forward" else _forward_of(division.kind, number)
        dropped = self._dropped(division, forward, mode)
        if one.phase == "forward":
            return Footprint(kept - dropped, peak, cached=self._weight_copies(division, one) if mode == "full" else 0.0)
        return Footprint(dropped + kept, dropped + peak, dropped, unborn=unborn)

    def _weight_copies(self, division: Division, one: Pass) -> float:
        """Copies of parameters in another dtype; compiled code does not cache them."""
        if self._fused[id(division)] is not None:
            return 0.0
        copies = weight_copies(division.kind)
        here = (op for op in copies if isinstance(op, int) and op in one.op_range)
        return sum(division.kind.ops[op].written_bytes.fixed * self._share(division, op) for op in here)

    def _dropped(self, division: Division, forward: int, mode: Mode) -> float:
        """Of what a forward keeps, what a recompute does without."""
        kept, _, _ = self._levels(division, forward)
        one, ops = division.kind.passes[forward], division.kind.ops
        output = one.output_bytes.at(self.samples) * division.result_share("@input")
        if mode in ("full", "offloaded"):
            return max(0.0, kept - output)
        if mode == "selective":
            return min(kept, self._core_bytes(division, one))
        again = redone_ops(division.kind, mode)
        if mode == "selective ops":  # results that are not redone are kept, needed or not
            rest = (op for op in one.op_range if op not in again)
            return (
                kept - output - sum(ops[op].written_bytes.at(self.samples) * self._share(division, op) for op in rest)
            )
        fused, behind = self._fused[id(division)], read_behind(division.kind)
        freed = (  # what the core hands on is kept: its readers behind it need it
            ops[op].saved_bytes.at(self.samples) * self._share(division, op)
            for op in one.op_range
            if op in again - behind and (fused is None or op in fused.kept_ops)
        )
        return min(kept, sum(freed))

    def _core_bytes(self, division: Division, one: Pass) -> float:
        """What the attention core need not keep, less what is kept to make it again."""
        ops, fused = division.kind.ops, self._fused[id(division)]
        dropped, added = dropped_ops(division.kind), kept_for_core(division.kind)
        freed = sum(
            ops[op].saved_bytes.at(self.samples) * self._share(division, op)
            for op in _in_pass(one, dropped)
            if fused is None or op in fused.kept_ops
        )
        if fused is not None:
            return freed
        held = (ops[op].written_bytes.at(self.samples) * self._share(division, op) for op in _in_pass(one, added))
        return freed - sum(held)

    def _levels(self, division: Division, number: int) -> tuple[float, float, float]:
        """Bytes when the pass ends and at its fullest, gradients of parameters included in the choice of that moment but not
        in the bytes; and the share of those gradients that is not made by then. Nothing is recomputed."""
        key = (id(division), number)
        if key not in self._walked:
            self._walked[key] = self._walk_levels(division, number)
        return self._walked[key]

    def _walk_levels(self, division: Division, number: int) -> tuple[float, float, float]:
        steps, samples = self._steps(division, number), self.samples
        total = steps.gradient_bytes
        level = gone = late = 0.0
        fullest = (0.0, 0.0, steps.unborn)
        for step in steps.taken:
            size = (step.fixed + step.per_sample * samples) * step.share
            if size < 0 and step.given_late:
                late += size
                continue
            level += size
            if step.not_kept:
                gone += size
            if size > 0 and step.maker is not None:
                inside = level
                if steps.passes_on:
                    inside += division.passing_bytes(step.maker, samples)
                full = inside + step.born * total
                if full >= fullest[0]:
                    fullest = max(fullest, (full, inside, 1 - step.born))
        added = self._added(division, number)
        at_the_end = (level + added + total, level + added, 0.0)
        _, peak, unborn = max(fullest, at_the_end)
        return level - gone + late + added, max(0.0, peak), unborn

    def _added(self, division: Division, number: int) -> float:
        """What fused code keeps from forward to backward beyond what plain code does."""
        fused = self._fused[id(division)]
        if fused is None:
            return 0.0
        one = division.kind.passes[number]
        forward = one if one.phase == "forward" else division.kind.passes[_forward_of(division.kind, number)]
        ops = division.kind.ops
        added = _in_pass(forward, fused.added_ops)
        size = sum(ops[op].written_bytes.at(self.samples) * self._share(division, op) for op in added)
        if fused.keeps_input:
            size += forward.output_bytes.at(self.samples) * division.result_share("@input")
        return size if one.phase == "forward" else -size

    def _steps(self, division: Division, number: int) -> Steps:
        """The same for any number of samples: kept beside the division."""
        key = (number, self._fused[id(division)] is not None)
        if key not in division.walks:
            division.walks[key] = self._make_steps(division, number)
        return division.walks[key]  # type: ignore[return-value]

    def _make_steps(self, division: Division, number: int) -> Steps:
        one = division.kind.passes[number]
        births = Births(division.kind, one)
        is_backward = one.phase == "backward"
        taken = []
        for event in one.events:
            source, not_kept = event.source, self._not_kept(division, event.source)
            if not (is_backward and not_kept):
                maker = source if isinstance(source, int) else None
                born = births.share_before(maker) if maker is not None else 0.0
                late = is_backward and self._read_again(division, source)
                share = self._share(division, source)
                taken.append(
                    Step(event.num_bytes.fixed, event.num_bytes.per_sample, share, maker, born, not_kept, late)
                )
        passes_on = any(division.goes_round(op) for op in division.kind.ops)
        return Steps(tuple(taken), births.total_bytes, 1.0 - births.share_before(one.first_op), passes_on)

    def _read_again(self, division: Division, source: Source) -> bool:
        """Whether fused code reads in backward what another block made, rather than keep its own copy of it: it is given
        back when the pass ends."""
        return self._fused[id(division)] is not None and isinstance(source, str) and "#" in source

    def _share(self, division: Division, source: Source) -> float:
        fused = self._fused[id(division)]
        if fused is not None and isinstance(source, int) and fused.is_gone(source):
            return 0.0
        return division.result_share(source)

    def _not_kept(self, division: Division, source: Source) -> bool:
        """Whether fused code gives a result of forward back before backward, though plain code keeps it."""
        fused = self._fused[id(division)]
        if fused is None or not isinstance(source, int) or division.kind.ops[source].phase == "backward":
            return False
        return source not in fused.kept_ops and source not in self._outputs_of(division)

    def _outputs_of(self, division: Division) -> frozenset[int]:
        """Ops of forward that nothing in the block's forward reads: what it hands on."""
        if id(division) not in self._outputs:
            ops = division.kind.ops
            read = {source for op in ops if op.phase == "forward" for source in op.inputs}
            self._outputs[id(division)] = frozenset(
                number for number, op in enumerate(ops) if op.phase == "forward" and number not in read
            )
        return self._outputs[id(division)]


def _in_pass(one: Pass, ops: frozenset[int]) -> list[int]:
    """In the order they run."""
    return sorted(op for op in ops if op in one.op_range)


def _forward_of(kind: Kind, backward: int) -> int:
    """The forward pass a backward pass belongs to: the last forward for the first backward, and so on."""
    forwards = [number for number, one in enumerate(kind.passes) if one.phase == "forward"]
    backwards = [number for number, one in enumerate(kind.passes) if one.phase == "backward"]
    place = backwards.index(backward)
    return forwards[max(0, len(forwards) - 1 - place)]
