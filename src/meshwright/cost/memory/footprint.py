"""Memory that one pass of a block allocates and frees on one rank, with recompute and compile.

plain       the memory events of the pass; each tensor counts with the share of it that this rank has
recompute   forward keeps the block's output and the results that are not recomputed; backward first rebuilds the others
fused       results that stay inside fused groups take no memory; backward recomputes the ones it needs
gradients   of parameters are not among the memory events: backward makes them one by one         -> GradientLiveness
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from meshwright.core.graph import Kind, MemoryEvent, Pass, Source
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.compute.fusion import Fused, is_fused, output_ops
from meshwright.cost.compute.recomputed_ops import (
    ActivationMode,
    activation_modes,
    dropped_ops,
    kept_for_core,
    read_after_core,
    recomputed_ops,
)
from meshwright.cost.local_block import LocalBlock
from meshwright.rules.kinds import cached_in_value
from meshwright.rules.labels import weight_copies


@dataclass(frozen=True)
class Footprint:
    """Bytes in use above the beginning of a pass: `kept` when it ends, `peak` at its fullest moment."""

    kept: float
    peak: float
    rebuilt: float = 0.0
    """The part of the peak that a recompute rebuilds."""
    pending_gradient_share: float = 0.0
    """The share of the block's parameter gradients that is not made yet at the fullest moment."""
    freed_outside: float = 0.0
    """Bytes of other blocks' results that a forward pass outside the blocks frees."""
    cached: float = 0.0
    """Copies of weights that autocast keeps until forward ends, though the block is recomputed."""


class Step(NamedTuple):
    """Memory that a pass allocates (or frees: negative) at one op, on one rank, for any number of samples."""

    fixed: float
    per_sample: float
    share: float
    """The share of the tensor that one rank has."""
    maker: int | None
    """The op whose result the tensor is, where that op is in this block."""
    gradient_share_before: float
    """The share of the block's parameter gradients that is made before that op."""
    not_kept: bool
    freed_late: bool
    """Whether the tensor is freed when the pass ends, and not before: another block's result that fused code reads again."""


class Steps(NamedTuple):
    taken: tuple[Step, ...]
    gradient_bytes: float
    pending_gradient_share: float
    """The share of the gradients that is not made when the pass begins."""


class GradientLiveness:
    """How much of a block's parameter gradients a backward pass has made when each of its ops begins.

    An op of backward makes one where its result has no tokens and no memory event names that op.
    """

    def __init__(self, kind: Kind, one: Pass) -> None:
        seen = {event.source for event in one.events}
        made = [
            (number, kind.ops[number].written_bytes.fixed)
            for number in one.op_range
            if one.phase == "backward" and number not in seen and not kind.ops[number].written_bytes.per_sample
        ]
        self._makers = [number for number, _ in made]
        self._bytes = list(accumulate((num_bytes for _, num_bytes in made), initial=0.0))
        self.total_bytes = self._bytes[-1]

    def share_made_before(self, number: int) -> float:
        """The share of the gradients, by bytes, that the ops before this one have made; 1 where the pass makes no gradients."""
        if not self.total_bytes:
            return 1.0
        return self._bytes[bisect_left(self._makers, number)] / self.total_bytes


class Footprints:
    """The footprint of every pass of a plan; each is computed once."""

    def __init__(
        self, plan: Plan, recipe: Recipe, like: Footprints | None = None, modes: dict[str, ActivationMode] | None = None
    ) -> None:
        """like: footprints of a plan with the same microbatch, sharding and compile setting; what they computed is reused.

        modes: how each block keeps its activations, if not as the plan says.
        """
        self.plan, self.recipe = plan, recipe
        self.modes = activation_modes(plan, recipe) if modes is None else modes
        self._blocks: dict[int, _BlockFootprints] = like._blocks if like else {}

    def of(self, local_block: LocalBlock, block: str, number: int) -> Footprint:
        known = self._blocks.get(id(local_block))
        if known is None:
            fused = local_block.fused if is_fused(block, self.plan, self.recipe) else None
            known = self._blocks[id(local_block)] = _BlockFootprints(local_block, fused, self.plan.microbatch)
        return known.of(number, self.modes.get(block, "none"), is_outside=not block)


class _BlockFootprints:
    """The footprints of one local block under every recompute mode. fused: its groups, where it runs compiled."""

    def __init__(self, local_block: LocalBlock, fused: Fused | None, samples: int) -> None:
        self.local_block, self.fused, self.samples = local_block, fused, samples
        self.kind = local_block.kind
        self._known: dict[tuple[int, ActivationMode], Footprint] = {}

    def of(self, number: int, mode: ActivationMode, *, is_outside: bool) -> Footprint:
        """is_outside: whether the pass is outside all named blocks."""
        key = (number, mode)
        if key not in self._known:
            found = self._recomputed(number, mode)
            self._known[key] = replace(found, freed_outside=self._freed_outside(number)) if is_outside else found
        return self._known[key]

    def _freed_outside(self, number: int) -> float:
        one = self.kind.passes[number]
        if one.phase == "backward":
            return 0.0
        sizes = (event.num_bytes.at(self.samples) for event in one.events if event.source == "@input")
        return -sum(min(0.0, size) for size in sizes) * self.local_block.result_share("@input")

    def _recomputed(self, number: int, mode: ActivationMode) -> Footprint:
        plain = self._without_recompute(number)
        if mode == "none":
            return plain
        if self.kind.passes[number].phase == "forward":
            cached = 0.0
            if mode == "full" and self.fused is None:  # compiled code does not cache copies of weights
                here = (op for op in weight_copies(self.kind) if op in self.kind.passes[number].op_range)
                cached = sum(
                    self.kind.ops[op].written_bytes.fixed * self._share(op) for op in here if isinstance(op, int)
                )
            return Footprint(plain.kept - self._dropped(number, mode), plain.peak, cached=cached)
        dropped = self._dropped(_forward_of(self.kind, number), mode)
        return Footprint(dropped + plain.kept, dropped + plain.peak, dropped, plain.pending_gradient_share)

    def _dropped(self, forward: int, mode: ActivationMode) -> float:
        """The bytes a forward pass would keep without recompute, and does not keep with it."""
        kind, one = self.kind, self.kind.passes[forward]
        kept = self._without_recompute(forward).kept
        if mode in ("full", "offloaded"):
            return max(0.0, kept - self._output(one))
        again = recomputed_ops(kind, mode)
        if mode == "selective ops":  # results that are not recomputed are kept, needed or not
            return kept - self._output(one) - sum(self._written(op) for op in one.op_range if op not in again)
        # the core's output is kept: ops after the core need it
        dropped = _in_pass(one, dropped_ops(kind) if mode == "selective" else again - read_after_core(kind))
        freed = sum(self._saved(op) for op in dropped if self.fused is None or op in self.fused.kept_ops)
        if mode == "selective" and self.fused is None:  # inputs are kept to recompute the core
            freed -= sum(self._written(op) for op in _in_pass(one, kept_for_core(kind)))
        return min(kept, freed)

    @cached_in_value
    def _without_recompute(self, number: int) -> Footprint:
        """Gradients count when the fullest moment is chosen, but are not in the bytes."""
        steps, samples = _steps_of(self.local_block, number, self.fused is not None), self.samples
        total, has_messages = steps.gradient_bytes, self.local_block.degrees.is_ring
        level = not_kept = freed_late = 0.0
        fullest = (0.0, 0.0, steps.pending_gradient_share)
        for step in steps.taken:
            size = (step.fixed + step.per_sample * samples) * step.share
            if size < 0 and step.freed_late:
                freed_late += size
                continue
            level += size
            if step.not_kept:
                not_kept += size
            if size > 0 and step.maker is not None:
                inside = level
                if has_messages:
                    inside += self.local_block.ring_message_bytes(step.maker, samples)
                full = inside + step.gradient_share_before * total
                if full >= fullest[0]:
                    fullest = max(fullest, (full, inside, 1 - step.gradient_share_before))
        added = self._added(number)
        at_the_end = (level + added + total, level + added, 0.0)
        _, peak, pending = max(fullest, at_the_end)
        return Footprint(level - not_kept + freed_late + added, max(0.0, peak), pending_gradient_share=pending)

    def _added(self, number: int) -> float:
        """Bytes that fused code keeps from forward to backward and plain code does not."""
        if self.fused is None:
            return 0.0
        one = self.kind.passes[number]
        forward = one if one.phase == "forward" else self.kind.passes[_forward_of(self.kind, number)]
        size = sum(self._written(op) for op in _in_pass(forward, self.fused.added_ops))
        if self.fused.keeps_input:
            size += self._output(forward)
        return size if one.phase == "forward" else -size

    # ------------------------------------------------------------ bytes of tensors on the rank

    def _written(self, op: int) -> float:
        return self.kind.ops[op].written_bytes.at(self.samples) * self._share(op)

    def _saved(self, op: int) -> float:
        return self.kind.ops[op].saved_bytes.at(self.samples) * self._share(op)

    def _output(self, one: Pass) -> float:
        return one.output_bytes.at(self.samples) * self.local_block.result_share("@input")

    def _share(self, source: Source) -> float:
        if self.fused is not None and isinstance(source, int) and self.fused.is_never_written(source):
            return 0.0
        return self.local_block.result_share(source)

    # ------------------------------------------------------------ steps

    def steps(self, number: int) -> Steps:
        one = self.kind.passes[number]
        liveness = GradientLiveness(self.kind, one)
        steps = (self._step(event, one, liveness) for event in one.events)
        taken = tuple(step for step in steps if not (one.phase == "backward" and step.not_kept))
        return Steps(taken, liveness.total_bytes, 1.0 - liveness.share_made_before(one.first_op))

    def _step(self, event: MemoryEvent, one: Pass, liveness: GradientLiveness) -> Step:
        source, size = event.source, event.num_bytes
        return Step(
            fixed=size.fixed,
            per_sample=size.per_sample,
            share=self._share(source),
            maker=source if isinstance(source, int) else None,
            gradient_share_before=liveness.share_made_before(source) if isinstance(source, int) else 0.0,
            not_kept=self._is_not_kept(source),
            freed_late=one.phase == "backward" and self.fused is not None and isinstance(source, str) and "#" in source,
        )

    def _is_not_kept(self, source: Source) -> bool:
        """Whether fused code frees a result of forward before backward, though plain code keeps it."""
        if self.fused is None or not isinstance(source, int) or self.kind.ops[source].phase == "backward":
            return False
        return source not in self.fused.kept_ops and source not in output_ops(self.kind)


@cached_in_value
def _steps_of(local_block: LocalBlock, number: int, is_fused: bool) -> Steps:
    """The steps of a pass are the same for any number of samples: the local block keeps them."""
    return _BlockFootprints(local_block, local_block.fused if is_fused else None, samples=0).steps(number)


def _in_pass(one: Pass, ops: frozenset[int]) -> list[int]:
    """The ops that the pass runs, in order."""
    return sorted(op for op in ops if op in one.op_range)


def _forward_of(kind: Kind, backward: int) -> int:
    """The forward pass a backward pass belongs to: the last forward for the first backward, and so on."""
    forwards = [number for number, one in enumerate(kind.passes) if one.phase == "forward"]
    backwards = [number for number, one in enumerate(kind.passes) if one.phase == "backward"]
    place = backwards.index(backward)
    return forwards[max(0, len(forwards) - 1 - place)]
