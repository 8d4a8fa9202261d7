"""Units of the sharding program: blocks that share every decision. All repeated blocks of a kind are one unit, and every other
block is a unit of its own.

A weight may be split

    column   by its outputs, row by its inputs     a matrix or a filter (not of a grouped convolution)
    table    by its rows, heads by its columns     a table that is looked up in

where tp divides the dim, where nothing else reads the weight, and where the runtime has not answered that it must stay whole.
Weights outside blocks stay whole, since a plan shards blocks by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from meshwright.core.graph import Graph, Kind, Op, Parameter, Source
from meshwright.core.legal import LegalSharding
from meshwright.core.names import expand_names
from meshwright.rules.labels import Way, weight_copies
from meshwright.rules.sharding import (
    is_depthwise,
    num_inputs,
    num_outputs,
    outputs_are_first,
    split_dim,
    weight_of,
)

MATRIX_DIMS = 2
Place = tuple[int, int]
"""Number of a unit and of one of its ops."""


@dataclass(frozen=True)
class Unit:
    """Blocks that share every decision."""

    blocks: tuple[str, ...]
    kind: Kind
    parameters: dict[str, Parameter]
    """Parameters of the first block, by the names that ops use."""
    copies: dict[Source, str]
    """Ops that only copy a parameter → the parameter."""
    weights: dict[int, str]
    """Forward ops that apply a matrix, a filter or a table → its name; depthwise filters go with their channels."""
    ways: dict[str, dict[Way, int]]
    """Weight → the ways it may be split → the dim each of them cuts."""
    repeated: bool

    def parameter_of(self, source: Source) -> Parameter | None:
        """The parameter behind an input of an op, which may be a copy in another dtype; None where there is none."""
        name = self.copies.get(source, source)
        return self.parameters.get(name) if isinstance(name, str) else None

    def activations(self, op: Op) -> list[Source]:
        """The inputs of an op that are no parameters."""
        return [source for source in op.inputs if source not in self.copies and self.parameter_of(source) is None]


def units_of(graph: Graph, tp: int, answer: LegalSharding | None = None) -> tuple[Unit, ...]:
    """The units of a graph, in the order of its kinds and blocks."""
    refused = _refused(answer)
    by_block: dict[str, dict[str, Parameter]] = {}
    for parameter in graph.parameters:
        by_block.setdefault(parameter.block, {})[parameter.own_name] = parameter
    return tuple(
        _unit(blocks, repeated, kind, by_block.get(blocks[0], {}), tp, refused.get(blocks[0], frozenset()))
        for kind in graph.kinds
        for blocks, repeated in _alike(graph, kind)
    )


def _alike(graph: Graph, kind: Kind) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(Blocks, whether they repeat): the repeated blocks of a kind together, the others one by one."""
    repeated = tuple(block.name for block in graph.blocks if block.kind == kind.name and block.repeated)
    if repeated:
        yield repeated, True
    for block in graph.blocks:
        if block.kind == kind.name and not block.repeated:
            yield (block.name,), False


def _unit(
    blocks: tuple[str, ...],
    repeated: bool,
    kind: Kind,
    parameters: dict[str, Parameter],
    tp: int,
    whole: Collection[str],
) -> Unit:
    copies = weight_copies(kind)
    weights: dict[int, str] = {}
    for number, op in enumerate(kind.ops):
        name = weight_of(op, parameters, copies) if op.phase == "forward" else None
        if name is not None and not is_depthwise(op, parameters[name]):
            weights[number] = name
    ways: dict[str, dict[Way, int]] = {}
    others = {*whole, *_read_otherwise(kind, copies, weights)}
    for number, name in weights.items():
        if blocks[0] and name not in others:
            own = _ways(kind.ops[number], name, kind, parameters)
            ways[name] = {way: dim for way, dim in own.items() if parameters[name].shape[dim] % tp == 0}
    return Unit(blocks, kind, parameters, copies, weights, ways, repeated)


def _ways(op: Op, name: str, kind: Kind, parameters: dict[str, Parameter]) -> dict[Way, int]:
    shape = parameters[name].shape
    ways: tuple[Way, ...] = ("column", "row")
    if op.name == "embedding":
        ways = ("table", "heads")
    elif op.kind == "convolution":
        if shape[1] != num_inputs(op):
            return {}  # in groups
    elif len(shape) != MATRIX_DIMS or {num_outputs(op), num_inputs(op)} != set(map(float, shape)):
        return {}
    first = outputs_are_first(name, kind, parameters)
    return {way: split_dim(way, first) for way in ways}


def _read_otherwise(kind: Kind, copies: dict[Source, str], weights: dict[int, str]) -> set[str]:
    """Parameters that some forward op reads otherwise than as its weight."""
    found: set[str] = set()
    for number, op in enumerate(kind.ops):
        if op.phase == "forward" and number not in copies:
            names = {copies.get(source, source) for source in op.inputs}
            found |= {name for name in names if isinstance(name, str) and name != weights.get(number)}
    return found


def _refused(answer: LegalSharding | None) -> dict[str, frozenset[str]]:
    """Block → its tensors that must stay whole, as the runtime answered."""
    return {
        name: frozenset(tensor.tensor for tensor in rule.tensors if "tp" not in tensor.dims and tensor.reason)
        for rule in (answer.sharding if answer else ())
        for name in expand_names(rule.for_blocks)
    }


class Passes:
    """The pass in which each op runs, and the order of passes."""

    def __init__(self, units: tuple[Unit, ...], graph: Graph) -> None:
        self.units = units
        self._pass_of = [
            {op: number for number, one in enumerate(unit.kind.passes) for op in one.op_range} for unit in units
        ]
        forward = [
            segment
            for segment in graph.timeline
            if graph.kind_by_block[segment.block].passes[segment.number].phase == "forward"
        ]
        repeated = set(graph.repeated_blocks)
        self._last = max((place for place, segment in enumerate(forward) if segment.block in repeated), default=-1)
        self._when = {(segment.block, segment.number): place for place, segment in enumerate(forward)}

    def of(self, place: Place) -> tuple[int, int | None]:
        """The unit and the pass in which an op runs."""
        return place[0], self._pass_of[place[0]].get(place[1])

    def precedes_repeated(self, place: Place) -> bool:
        """Whether the op of a single block runs before a repeated block does."""
        unit = self.units[place[0]]
        when = self._when.get((unit.blocks[0], self._pass_of[place[0]].get(place[1], -1)), self._last)
        return not unit.repeated and when < self._last
