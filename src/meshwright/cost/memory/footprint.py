"""Memory that one pass of a block allocates and frees on one rank, with recompute and compile.

plain       the memory events of the pass; each tensor counts with the share of it that this rank has
recompute   forward keeps the block's output and the results that are not recomputed; backward first rebuilds the others
fused       results that stay inside fused groups take no memory; backward computes those it needs again
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.core.graph import Kind, Pass, Source
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.compute.fusion import Fused, is_fused
from meshwright.cost.compute.recomputed_ops import (
    ActivationMode,
    activation_modes,
    dropped_ops,
    kept_for_core,
    read_behind,
    recomputed_ops,
)
from meshwright.cost.local_block import LocalBlock
from meshwright.cost.memory.gradient_liveness import GradientLiveness
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
    given_back: float = 0.0
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
    given_late: bool
    """Whether the tensor is freed when the pass ends, and not before."""


class Steps(NamedTuple):
    taken: tuple[Step, ...]
    gradient_bytes: float
    pending_gradient_share: float
    """The share of the gradients that is not made when the pass begins."""
    has_ring_messages: bool
    """Whether some op holds messages in addition to its tensors."""


class Footprints:
    """The footprint of every pass of a plan; each is computed once."""

    def __init__(
        self, plan: Plan, recipe: Recipe, like: Footprints | None = None, modes: dict[str, ActivationMode] | None = None
    ) -> None:
        """like: footprints of a plan with the same microbatch, sharding and compile setting; what they computed is reused.

        modes: how each block keeps its activations, if not as the plan says.
        """
        self.plan, self.recipe = plan, recipe
        self.samples = plan.microbatch
        self.modes = activation_modes(plan, recipe) if modes is None else modes
        self._known: dict[tuple[int, int, str], Footprint] = like._known if like else {}
        self._walked: dict[tuple[int, int], tuple[float, float, float]] = like._walked if like else {}
        self._fused: dict[int, Fused | None] = like._fused if like else {}
        self._outputs: dict[int, frozenset[int]] = like._outputs if like else {}

    def of(self, local_block: LocalBlock, block: str, number: int) -> Footprint:
        mode = self.modes.get(block, "none")
        key = (id(local_block), number, mode)
        if key not in self._known:
            if id(local_block) not in self._fused:
                fused = is_fused(block, self.plan, self.recipe)
                self._fused[id(local_block)] = local_block.fused if fused else None
            found = self._walk(local_block, number, mode)
            self._known[key] = found if block else replace(found, given_back=self._given_back(local_block, number))
        return self._known[key]

    def _given_back(self, local_block: LocalBlock, number: int) -> float:
        one = local_block.kind.passes[number]
        if one.phase == "backward":
            return 0.0
        sizes = (event.num_bytes.at(self.samples) for event in one.events if event.source == "@input")
        return -sum(min(0.0, size) for size in sizes) * local_block.result_share("@input")

    def _walk(self, local_block: LocalBlock, number: int, mode: ActivationMode) -> Footprint:
        one = local_block.kind.passes[number]
        kept, peak, pending_gradient_share = self._levels(local_block, number)
        if mode == "none":
            return Footprint(kept, peak, pending_gradient_share=pending_gradient_share)
        forward = number if one.phase == "forward" else _forward_of(local_block.kind, number)
        dropped = self._dropped(local_block, forward, mode)
        if one.phase == "forward":
            return Footprint(
                kept - dropped, peak, cached=self._weight_copies(local_block, one) if mode == "full" else 0.0
            )
        return Footprint(dropped + kept, dropped + peak, dropped, pending_gradient_share=pending_gradient_share)

    def _weight_copies(self, local_block: LocalBlock, one: Pass) -> float:
        """Copies of parameters in another dtype; compiled code does not cache them."""
        if self._fused[id(local_block)] is not None:
            return 0.0
        copies = weight_copies(local_block.kind)
        here = (op for op in copies if isinstance(op, int) and op in one.op_range)
        return sum(local_block.kind.ops[op].written_bytes.fixed * self._share(local_block, op) for op in here)

    def _dropped(self, local_block: LocalBlock, forward: int, mode: ActivationMode) -> float:
        """The bytes forward would keep without recompute, and does not keep with it."""
        kept, _, _ = self._levels(local_block, forward)
        one, ops = local_block.kind.passes[forward], local_block.kind.ops
        output = one.output_bytes.at(self.samples) * local_block.result_share("@input")
        if mode in ("full", "offloaded"):
            return max(0.0, kept - output)
        if mode == "selective":
            return min(kept, self._core_bytes(local_block, one))
        again = recomputed_ops(local_block.kind, mode)
        if mode == "selective ops":  # results that are not recomputed are kept, needed or not
            rest = (op for op in one.op_range if op not in again)
            return (
                kept
                - output
                - sum(ops[op].written_bytes.at(self.samples) * self._share(local_block, op) for op in rest)
            )
        fused, behind = self._fused[id(local_block)], read_behind(local_block.kind)
        freed = (  # the core's output is kept: ops after the core need it
            ops[op].saved_bytes.at(self.samples) * self._share(local_block, op)
            for op in one.op_range
            if op in again - behind and (fused is None or op in fused.kept_ops)
        )
        return min(kept, sum(freed))

    def _core_bytes(self, local_block: LocalBlock, one: Pass) -> float:
        """The bytes that the attention core need not keep, less the inputs that are kept to recompute it."""
        ops, fused = local_block.kind.ops, self._fused[id(local_block)]
        dropped, added = dropped_ops(local_block.kind), kept_for_core(local_block.kind)
        freed = sum(
            ops[op].saved_bytes.at(self.samples) * self._share(local_block, op)
            for op in _in_pass(one, dropped)
            if fused is None or op in fused.kept_ops
        )
        if fused is not None:
            return freed
        held = (ops[op].written_bytes.at(self.samples) * self._share(local_block, op) for op in _in_pass(one, added))
        return freed - sum(held)

    def _levels(self, local_block: LocalBlock, number: int) -> tuple[float, float, float]:
        """Without recompute: bytes when the pass ends, bytes at its fullest moment, and the share of the parameter gradients that
        is not made by that moment. Gradients count when the fullest moment is chosen, but are not in the bytes."""
        key = (id(local_block), number)
        if key not in self._walked:
            self._walked[key] = self._walk_levels(local_block, number)
        return self._walked[key]

    def _walk_levels(self, local_block: LocalBlock, number: int) -> tuple[float, float, float]:
        steps, samples = self._steps(local_block, number), self.samples
        total = steps.gradient_bytes
        level = gone = late = 0.0
        fullest = (0.0, 0.0, steps.pending_gradient_share)
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
                if steps.has_ring_messages:
                    inside += local_block.ring_message_bytes(step.maker, samples)
                full = inside + step.gradient_share_before * total
                if full >= fullest[0]:
                    fullest = max(fullest, (full, inside, 1 - step.gradient_share_before))
        added = self._added(local_block, number)
        at_the_end = (level + added + total, level + added, 0.0)
        _, peak, pending_gradient_share = max(fullest, at_the_end)
        return level - gone + late + added, max(0.0, peak), pending_gradient_share

    def _added(self, local_block: LocalBlock, number: int) -> float:
        """Bytes that fused code keeps from forward to backward and plain code does not."""
        fused = self._fused[id(local_block)]
        if fused is None:
            return 0.0
        one = local_block.kind.passes[number]
        forward = one if one.phase == "forward" else local_block.kind.passes[_forward_of(local_block.kind, number)]
        ops = local_block.kind.ops
        added = _in_pass(forward, fused.added_ops)
        size = sum(ops[op].written_bytes.at(self.samples) * self._share(local_block, op) for op in added)
        if fused.keeps_input:
            size += forward.output_bytes.at(self.samples) * local_block.result_share("@input")
        return size if one.phase == "forward" else -size

    def _steps(self, local_block: LocalBlock, number: int) -> Steps:
        """The steps are the same for any number of samples: the local block keeps them."""
        key = (number, self._fused[id(local_block)] is not None)
        if key not in local_block.memory_steps:
            local_block.memory_steps[key] = self._make_steps(local_block, number)
        return local_block.memory_steps[key]  # type: ignore[return-value]

    def _make_steps(self, local_block: LocalBlock, number: int) -> Steps:
        one = local_block.kind.passes[number]
        liveness = GradientLiveness(local_block.kind, one)
        is_backward = one.phase == "backward"
        taken = []
        for event in one.events:
            source, not_kept = event.source, self._not_kept(local_block, event.source)
            if not (is_backward and not_kept):
                maker = source if isinstance(source, int) else None
                gradient_share_before = liveness.share_made_before(maker) if maker is not None else 0.0
                late = is_backward and self._read_again(local_block, source)
                share = self._share(local_block, source)
                taken.append(
                    Step(
                        event.num_bytes.fixed,
                        event.num_bytes.per_sample,
                        share,
                        maker,
                        gradient_share_before,
                        not_kept,
                        late,
                    )
                )
        has_ring_messages = any(local_block.is_ring_attention(op) for op in local_block.kind.ops)
        return Steps(
            tuple(taken), liveness.total_bytes, 1.0 - liveness.share_made_before(one.first_op), has_ring_messages
        )

    def _read_again(self, local_block: LocalBlock, source: Source) -> bool:
        """Whether fused code reads another block's result in backward, rather than keep its own copy of it: the result is freed
        when the pass ends."""
        return self._fused[id(local_block)] is not None and isinstance(source, str) and "#" in source

    def _share(self, local_block: LocalBlock, source: Source) -> float:
        fused = self._fused[id(local_block)]
        if fused is not None and isinstance(source, int) and fused.is_gone(source):
            return 0.0
        return local_block.result_share(source)

    def _not_kept(self, local_block: LocalBlock, source: Source) -> bool:
        """Whether fused code frees a result of forward before backward, though plain code keeps it."""
        fused = self._fused[id(local_block)]
        if fused is None or not isinstance(source, int) or local_block.kind.ops[source].phase == "backward":
            return False
        return source not in fused.kept_ops and source not in self._outputs_of(local_block)

    def _outputs_of(self, local_block: LocalBlock) -> frozenset[int]:
        """Forward ops whose results no forward op of the block reads: the block's outputs."""
        if id(local_block) not in self._outputs:
            ops = local_block.kind.ops
            read = {source for op in ops if op.phase == "forward" for source in op.inputs}
            self._outputs[id(local_block)] = frozenset(
                number for number, op in enumerate(ops) if op.phase == "forward" and number not in read
            )
        return self._outputs[id(local_block)]


def _in_pass(one: Pass, ops: frozenset[int]) -> list[int]:
    """In the order they run."""
    return sorted(op for op in ops if op in one.op_range)


def _forward_of(kind: Kind, backward: int) -> int:
    """The forward pass a backward pass belongs to: the last forward for the first backward, and so on."""
    forwards = [number for number, one in enumerate(kind.passes) if one.phase == "forward"]
    backwards = [number for number, one in enumerate(kind.passes) if one.phase == "backward"]
    place = backwards.index(backward)
    return forwards[max(0, len(forwards) - 1 - place)]
