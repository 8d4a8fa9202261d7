"""The forward ops of a block that one stage runs, and how far a second forward goes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

from meshwright.core.graph import Kind, Op, Shape, Source
from meshwright.core.plan import Plan
from meshwright.cost.local_block import Division
from meshwright.rules.once import once_per_kind

WORK_ALONG = ("sum", "mean", "cumsum", "cumprod", "logcumsumexp")
"""Ops that sum over tokens, or run along them."""
KEEP_NOTHING = ("add", "sub", "clone", "_to_copy", "sum", "mean", "cat", "stack")
"""Ops whose backward needs nothing of what they read."""


class BlockOps:
    """The forward ops of a block that a stage runs."""

    def __init__(self, division: Division, plan: Plan, passes: Collection[int] | None, last_needed: int | None) -> None:
        self.division, self.plan = division, plan
        self.last_needed = last_needed
        every = division.kind.passes
        self.numbers: Collection[int] = range(len(division.kind.ops))
        if passes is not None:
            self.numbers = frozenset(n for number in passes for n in every[number].op_range)

    @property
    def cp(self) -> int:
        """Over how many ranks the block's tokens lie."""
        return self.division.degrees.cp

    def elements(self, shape: Shape) -> float:
        """Of an activation, on the rank."""
        return self._elements(shape) * self.division.degrees.token_share

    def sent_elements(self, shape: Shape) -> float:
        """Of an activation, what a rank sends of it along cp."""
        return self._elements(shape) * self.division.degrees.sent_share

    def _elements(self, shape: Shape) -> float:
        return prod(dim.at(self.plan.microbatch) for dim in shape)

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        """Of those that may call collectives of their own."""
        return ((number, op) for number, op in calling_ops(self.division.kind) if number in self.numbers)

    def readers(self, source: int) -> int:
        """How often the result of an op is read."""
        found = readers_of(self.division.kind).get(source, {})
        return sum(times for number, times in found.items() if number in self.numbers)

    def of(self, wanted: tuple[int, ...]) -> list[Op]:
        return [self.division.kind.ops[number] for number in wanted if number in self.numbers]

    def made(self, wanted: tuple[int, ...]) -> list[Op]:
        """Those whose result is needed, in a second forward."""
        return self.of(tuple(number for number in wanted if self.is_made(number)))

    def is_made(self, number: int) -> bool:
        return self.last_needed is None or number < self.last_needed


@once_per_kind
def calling_ops(kind: Kind) -> tuple[tuple[int, Op], ...]:
    """Forward ops that may call collectives of their own: of the loss, of lookups, of attention, of experts, along tokens."""
    return tuple((number, op) for number, op in enumerate(kind.ops) if op.phase == "forward" and _may_call(op))


def _may_call(op: Op) -> bool:
    in_region = op.kind == "matmul" and op.region in ("attention", "expert")
    of_loss = "softmax" in op.name or op.name.startswith("nll_loss")
    return in_region or of_loss or op.kind == "attention" or op.name == "embedding" or op.name in WORK_ALONG


@once_per_kind
def readers_of(kind: Kind) -> dict[Source, dict[int, int]]:
    """What forward ops read → the ops that do, each with how often."""
    found: dict[Source, dict[int, int]] = {}
    for number, op in enumerate(kind.ops):
        if op.phase == "forward":
            for source in op.inputs:
                times = found.setdefault(source, {})
                times[number] = times.get(number, 0) + 1
    return found


@once_per_kind
def last_needed(kind: Kind) -> int:
    """The last forward op that keeps something for backward: what it reads, or what it makes and the block itself reads.

    What only the next block reads is that one's input, and is there.
    """
    last = -1
    readers = readers_of(kind)
    for number, op in enumerate(kind.ops):
        kept = op.phase == "forward" and (op.saved_bytes.fixed or op.saved_bytes.per_sample)
        if kept and number in readers:
            keepers = [reader for reader in readers[number] if kind.ops[reader].name not in KEEP_NOTHING]
            last = max(last, *(keepers or [number]))
    return last
