"""Kernel fusion under torch.compile: ops that only move bytes are fused into groups, one kernel each.

Equal ops on equal inputs are done once. A group is a set of fusible ops of one phase that feed each other with no matmul or
attention between them: all ops of a group have equally many matmuls and attentions before them. A group reads each input from
outside it once, and writes the results that something outside it needs: a matmul, another phase, the next block. Results that
stay inside a group are never in memory.

The tensors kept for backward are chosen anew:                                                     -> Fused.kept_ops
    results of matmuls and attention, and fused results that are written anyway       are kept, as without compiling
    a sum (the residual stream) with the result of one matmul of fewer bytes          is computed again from that result
    what stays inside a group                                                         is computed again from what it read
Plain code that casts a block's input keeps the copy and drops the input; compiled code does the reverse, and keeps the matmul's
result that is added to it.                                                                        -> Fused.added_ops
This is what the partitioner of torch.compile was seen to choose for transformer blocks and for the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.core.cluster import FLOP_KINDS
from meshwright.core.graph import Affine, Kind, Op, Source
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.rules.kinds import cached_in_value, reached


@dataclass(frozen=True)
class Fused:
    """The groups of one kind of block."""

    group_of: dict[int, int]
    members: dict[int, tuple[int, ...]]
    moved: dict[int, Affine]
    """Bytes each group reads and writes."""
    written: frozenset[int]
    """Fused ops whose results are in memory all the same."""
    kept_ops: frozenset[int]
    """Ops of forward whose results are kept for backward."""
    added_ops: frozenset[int]
    """The part of `kept_ops` that plain code does not keep."""
    keeps_input: bool
    """Whether the block's input is kept, which plain code drops."""

    def bytes_at(self, group: int, samples: float) -> float:
        return self.moved[group].at(samples)

    def is_never_written(self, number: int) -> bool:
        """Whether a fused op's result is never in memory."""
        return number in self.group_of and number not in self.written


def is_fused(block: str, plan: Plan, recipe: Recipe) -> bool:
    """Whether the ops of a block run fused: all of a compiled plan; other systems may run the loss in another way."""
    if block == "" and recipe.system.loss is not None:
        return recipe.system.loss == "fused"
    return plan.compile or recipe.system.fused_ops


@cached_in_value
def fused_groups(kind: Kind) -> Fused:
    first_of = _first_of_equals(kind)
    group_of = _groups(kind, first_of)
    members: dict[int, list[int]] = {}
    for number, group in group_of.items():
        members.setdefault(group, []).append(number)
    written = _written(kind, group_of, first_of)
    kept, reads_input = _kept(kind, group_of, written, first_of)
    # blocks of a kind follow each other: what one hands on is the next one's input
    keeps_input = reads_input and not any(kind.ops[number].is_saved for number in output_ops(kind))
    return Fused(
        group_of=group_of,
        members={group: tuple(numbers) for group, numbers in members.items()},
        moved={group: _moved(kind, numbers, group_of, written, first_of) for group, numbers in members.items()},
        written=written,
        kept_ops=kept,
        added_ops=frozenset(number for number in kept if keeps_input and not kind.ops[number].is_saved),
        keeps_input=keeps_input,
    )


def _fusible(op: Op) -> bool:
    return op.kind not in FLOP_KINDS and op.name not in ("embedding", "embedding_dense_backward")


def _first_of_equals(kind: Kind) -> dict[int, int]:
    """Op → the first op that does the same with the same: copies of one tensor for several weights are made once."""
    seen: dict[tuple[object, ...], int] = {}
    first_of: dict[int, int] = {}
    for number, op in enumerate(kind.ops):
        inputs = tuple(first_of.get(source, source) if isinstance(source, int) else source for source in op.inputs)
        key = (op.name, op.phase, op.dtype, inputs, op.result_shape)
        first_of[number] = seen.setdefault(key, number) if _fusible(op) and "@input" not in inputs else number
    return first_of


def _groups(kind: Kind, first_of: dict[int, int]) -> dict[int, int]:
    """Op → group, by joining neighbours along the edges, within a phase and between the same flop-bound ops."""
    group_of: dict[int, int] = {}
    depths: dict[int, int] = {}
    for number, op in enumerate(kind.ops):
        sources = [source for source in op.inputs if isinstance(source, int)]
        before = max((depths[source] + (not _fusible(kind.ops[source])) for source in sources), default=0)
        depths[number] = before
        if not _fusible(op):
            continue
        joined = {
            group_of[first_of[source]]
            for source in sources
            if first_of[source] in group_of and kind.ops[source].phase == op.phase and depths[source] == before
        }
        target = min(joined, default=number)
        group_of[number] = group_of[first_of[number]] if first_of[number] != number else target
        for other, group in group_of.items():
            if group in joined:
                group_of[other] = target
    return group_of


def _written(kind: Kind, group_of: dict[int, int], first_of: dict[int, int]) -> frozenset[int]:
    """Fused ops whose result something outside the group reads in the same phase, or nothing in the block reads at all."""
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(kind.ops):
        for source in op.inputs:
            if isinstance(source, int) and kind.ops[first_of[source]].phase == op.phase:
                readers.setdefault(first_of[source], []).append(number)
    return frozenset(
        number
        for number, group in group_of.items()
        if first_of[number] == number
        and (number not in readers or any(group_of.get(reader) != group for reader in readers[number]))
    )


def _moved(
    kind: Kind, numbers: list[int], group_of: dict[int, int], written: frozenset[int], first_of: dict[int, int]
) -> Affine:
    """Distinct outside inputs read once, needed results written. What an op reads is divided over its inputs by their elements."""
    read: dict[Source, Affine] = {}
    fixed = per_sample = 0.0
    for number in numbers:
        op = kind.ops[number]
        sizes = [prod(dim.at(1) for dim in shape) for shape in op.input_shapes]
        whole = sum(sizes) or 1.0
        for source, size in zip(op.inputs, sizes, strict=False):
            origin = first_of[source] if isinstance(source, int) else source
            if not (isinstance(origin, int) and group_of.get(origin) == group_of[number]):
                part = Affine(op.read_bytes.fixed * size / whole, op.read_bytes.per_sample * size / whole)
                read[origin if origin != "@input" else f"@input{len(read)}"] = part
        if number in written:
            fixed += op.written_bytes.fixed
            per_sample += op.written_bytes.per_sample
    return Affine(
        fixed + sum(part.fixed for part in read.values()), per_sample + sum(part.per_sample for part in read.values())
    )


def _kept(
    kind: Kind, group_of: dict[int, int], written: frozenset[int], first_of: dict[int, int]
) -> tuple[frozenset[int], bool]:
    """Ops whose results backward needs, or recomputes others from; and whether it recomputes something from the block's input."""
    kept: set[int] = set()
    reads_input = False
    for number, op in kind.forward_ops:
        if not op.is_saved:
            continue
        if number not in group_of:
            kept.add(number)
        elif first_of[number] in written:
            kept.add(_smaller_origin(kind, first_of[number], group_of))
        else:
            sources = _sources(kind, number, group_of)
            kept |= {source for source in sources if isinstance(source, int) and source not in group_of}
            reads_input = reads_input or "@input" in sources
    return frozenset(kept), reads_input


def _smaller_origin(kind: Kind, number: int, group_of: dict[int, int]) -> int:
    """A sum with one matmul's result of fewer bytes is computed again from it."""
    op = kind.ops[number]
    made = [source for source in op.inputs if isinstance(source, int) and source not in group_of]
    if op.kind == "elementwise" and len(op.inputs) == 2 and len(made) == 1:
        other = kind.ops[made[0]]
        if other.written_bytes.per_sample < op.saved_bytes.per_sample:
            return made[0]
    return number


@cached_in_value
def output_ops(kind: Kind) -> frozenset[int]:
    """Forward ops whose results no forward op of the block reads: the block's outputs."""
    read = {source for _, op in kind.forward_ops for source in op.inputs}
    return frozenset(number for number, _ in kind.forward_ops if number not in read)


def _sources(kind: Kind, number: int, group_of: dict[int, int]) -> set[Source]:
    """The tensors that a fused result is computed from, through ops of its group."""
    group = {other for other, its in group_of.items() if its == group_of[number]}
    inside = reached([number], lambda made: group.intersection(kind.ops[made].inputs))
    return {source for made in inside for source in kind.ops[made].inputs}
