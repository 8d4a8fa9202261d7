"""Collectives of ops that sum over tokens or run along them, where tokens lie over cp or, in sequence parallel, over tp.

A router's balance and its experts' capacity need such sums: small numbers about all tokens of a microbatch. The op reads a tensor
of t bytes in all, and makes a result of r bytes:

    sum, mean of fractions          all-reduce of r, once for each reader of the result; along cp the same for the gradient
    sum of whole numbers            all-gather of t / degree
    cumsum                          all-gather of t / degree; along cp the gradient by a reduce-scatter of t

Where tokens lie over both axes, each tp rank has a part of its cp rank's tokens; parts are gathered over tp first. Tensors made
from the batch alone are whole on every rank. Inside a module of experts each rank counts its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from meshwright.core.axes import Axis
from meshwright.core.graph import PRECISION_BYTES, Kind, Op, Source
from meshwright.cost.communication.block_ops import WORK_ALONG, BlockOps
from meshwright.cost.communication.links import Call
from meshwright.rules.kinds import cached_in_value, reached

SUMS = ("sum", "mean")
STREAM_DIMS = 3
"""Samples, tokens, features."""
NOT_DIFFERENTIATED = (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not",
    "isnan", "argmax", "argmin", "arange", "zeros_like", "ones_like", "new_zeros", "new_ones", "full", "floor_divide", "detach",
)  # fmt: skip
"""Ops whose result has no gradient, whatever they read."""


def token_calls(own: BlockOps) -> Iterator[Call]:
    """Collectives of one microbatch through one block."""
    if own.cp == 1 and not own.plan.sequence_parallel:
        return
    kind = own.local_block.kind
    for number, op in own:
        if op.name not in WORK_ALONG or op.region == "expert" or not own.is_made(number):
            continue
        if not _lies_over_ranks(kind, number) or (op.name in SUMS and not _sums_tokens(op)):
            continue
        needs_gradient = own.is_forward or _is_differentiated(kind, number)
        if op.name in SUMS and _is_fraction(op):
            readers = max(1, own.readers(number))
            for axis in _axes(own, op):
                if own.is_forward or (axis == "cp" and needs_gradient):
                    yield own.call("all_reduce", op.written_bytes.at(own.plan.microbatch), axis, readers)
        else:
            yield from _gather_calls(own, op, needs_gradient)


def _gather_calls(own: BlockOps, op: Op, needs_gradient: bool) -> Iterator[Call]:
    """Gathers start at the axis that was cut last; the next axis then gathers the result."""
    mesh, axes = own.plan.mesh, _axes(own, op)
    part = op.read_bytes.at(own.plan.microbatch) * (own.local_block.degrees.sent_share if "cp" in axes else 1)
    part /= mesh.tp if "tp" in axes else 1
    for axis in reversed(axes):
        if own.is_forward:
            yield own.call("all_gather", part, axis)
        elif axis == "cp" and needs_gradient:
            yield own.call("reduce_scatter", part * own.cp, axis)
        part *= mesh.degrees[axis]


def _axes(own: BlockOps, op: Op) -> list[Axis]:
    """The axes that the tokens which the op reads are sharded over."""
    found: list[Axis] = ["cp"] if own.cp > 1 else []
    is_whole = all(own.local_block.labels.of(source) == "whole" for source in op.inputs)
    return [*found, "tp"] if own.plan.sequence_parallel and is_whole else found


def _sums_tokens(op: Op) -> bool:
    """Whether nothing of the tokens is left: neither of all samples, nor, in a stream, of each."""
    read, made = op.input_shapes[0], op.result_shape
    if op.read_bytes.per_sample and not op.written_bytes.per_sample:
        return True
    if len(read) != STREAM_DIMS or not read[0].per_sample or read[1] == read[2]:
        return False
    return made == (read[0], read[2]) or (len(made) == STREAM_DIMS and made[1] != read[1] and made[2] == read[2])


def _is_fraction(op: Op) -> bool:
    """Told by the size of an element: counts are kept in 8 bytes and truths in one. A mean is of fractions anyway."""
    elements = prod(dim.at(1) for dim in op.input_shapes[0])
    return op.name == "mean" or op.read_bytes.at(1) == elements * PRECISION_BYTES[op.dtype]


@cached_in_value
def _lies_over_ranks(kind: Kind, number: int) -> bool:
    """Whether it reads tokens of the stream; a lookup of the batch's ids makes some."""
    sources = _upstream(kind, number, stops=("embedding",))
    lookups = (kind.ops[source] for source in sources if isinstance(source, int))
    return any(isinstance(source, str) and source[0] == "@" and source != "@batch" for source in sources) or any(
        lookup.name == "embedding" and "@batch" in lookup.inputs for lookup in lookups
    )


@cached_in_value
def _is_differentiated(kind: Kind, number: int) -> bool:
    sources = _upstream(kind, number, stops=NOT_DIFFERENTIATED)
    return any(isinstance(source, str) and source != "@batch" for source in sources)


def _upstream(kind: Kind, number: int, stops: tuple[str, ...]) -> set[Source]:
    """The sources that an op's result follows from, in its block; not beyond ops of these names."""

    def read(source: Source) -> tuple[Source, ...]:
        if isinstance(source, int) and kind.ops[source].name not in stops:
            return kind.ops[source].inputs
        return ()

    return reached(kind.ops[number].inputs, read)
