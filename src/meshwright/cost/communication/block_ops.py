"""The forward ops of a block that one stage runs, with the sizes of their tensors on one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

from meshwright.core.axes import Axis
from meshwright.core.collective import CollectiveKind
from meshwright.core.graph import Kind, Op, Phase, Shape
from meshwright.core.plan import Plan
from meshwright.cost.communication.links import Call, axis_group
from meshwright.cost.compute.recomputed_ops import readers_of
from meshwright.cost.local_block import LocalBlock
from meshwright.rules.kinds import cached_in_value

WORK_ALONG = ("sum", "mean", "cumsum", "cumprod", "logcumsumexp")
"""Ops that sum over tokens, or run along them."""


class BlockOps:
    """The forward ops of a block that a stage runs."""

    def __init__(
        self,
        local_block: LocalBlock,
        plan: Plan,
        phase: Phase,
        passes: Collection[int] | None,
        last_needed: int | None,
    ) -> None:
        """last_needed: in a second forward, the op after which nothing more is made."""
        self.local_block, self.plan, self.phase, self.last_needed = local_block, plan, phase, last_needed
        every = local_block.kind.passes
        self.numbers: Collection[int] = range(len(local_block.kind.ops))
        if passes is not None:
            self.numbers = frozenset(n for number in passes for n in every[number].op_range)

    @property
    def cp(self) -> int:
        """Number of ranks that the block's tokens are sharded over."""
        return self.local_block.degrees.cp

    @property
    def is_forward(self) -> bool:
        return self.phase == "forward"

    def call(self, kind: CollectiveKind, num_bytes: float, axis: Axis, count: int = 1) -> Call:
        """A collective along an axis in this phase."""
        return Call(kind, round(num_bytes), count, self.phase, axis, axis_group(self.plan.mesh, axis))

    def elements(self, shape: Shape) -> float:
        """Elements of an activation on the rank."""
        return self.whole_elements(shape) * self.local_block.degrees.token_share

    def whole_elements(self, shape: Shape) -> float:
        return prod(dim.at(self.plan.microbatch) for dim in shape)

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        """The ops of the stage that may call collectives of their own, with their numbers."""
        return ((number, op) for number, op in calling_ops(self.local_block.kind) if number in self.numbers)

    def readers(self, source: int) -> int:
        """How often the result of an op is read."""
        found = readers_of(self.local_block.kind).get(source, {})
        return sum(times for number, times in found.items() if number in self.numbers)

    def of(self, wanted: tuple[int, ...]) -> list[Op]:
        return [self.local_block.kind.ops[number] for number in wanted if number in self.numbers]

    def is_made(self, number: int) -> bool:
        """Whether an op's result is made: a recompute stops where backward needs nothing more."""
        return self.last_needed is None or number < self.last_needed


@cached_in_value
def calling_ops(kind: Kind) -> tuple[tuple[int, Op], ...]:
    """Forward ops that may call collectives of their own: the loss, lookups, attention, experts, sums over tokens."""

    def may_call(op: Op) -> bool:
        in_region = op.kind == "matmul" and op.region in ("attention", "expert")
        of_loss = "softmax" in op.name or op.name.startswith("nll_loss")
        return in_region or of_loss or op.kind == "attention" or op.name == "embedding" or op.name in WORK_ALONG

    return tuple((number, op) for number, op in kind.forward_ops if may_call(op))
