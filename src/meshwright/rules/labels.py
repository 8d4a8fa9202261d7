"""How the tensors of a block lie over tp: labels along its ops.

A result is *whole* (each tp rank has all of it) or *split* (each has 1/tp, along the features or heads). Along the ops:

    y = x W, W split by its outputs (column):   x whole  →  y split;  backward adds up x's gradient     (one all-reduce
                                                                                                         for all that read x)
    y = x W, W split by its inputs (row):       x split  →  y whole;  forward adds up y                 (one all-reduce)
    embedding, table split by its rows:         y whole;  forward adds up y                             (one all-reduce)
    gradient of such a table:                   split: a rank adds up the rows it has
    embedding, table split by its heads:        y split
    any other op:                               split where one of its inputs is split
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.core.graph import Kind, Op, Shape, Source
from meshwright.rules.kinds import cached_in_value

Label = Literal["whole", "split"]
Way = Literal["column", "row", "table", "heads"]
"""By its outputs, by its inputs, a table by its rows, or a table of biases by the heads they are for."""


@dataclass(frozen=True)
class Labels:
    """The labels of the ops of one kind under tp."""

    results: tuple[Label, ...]
    """One label an op: of the tensor it makes."""
    work_split: tuple[bool, ...]
    """Whether the op does 1/tp of its work."""
    reduced_forward: tuple[int, ...]
    """Ops whose result is added up over tp in forward."""
    reduced_backward: tuple[int, ...]
    """Ops (one per tensor that weights split by outputs read) whose first input's gradient is added up in backward."""
    outside: dict[Source, Label]
    """Labels of tensors that other blocks made; whole where not named."""

    def of(self, source: Source) -> Label:
        """The label of a tensor that an op reads."""
        return self.results[source] if isinstance(source, int) else self.outside.get(source, "whole")


def labels_of(kind: Kind, ways: dict[str, Way], outside: dict[Source, Label] | None = None) -> Labels:
    """Follow the labels along a kind's ops. `outside`: labels of tensors that other blocks made, whole where not named."""
    known: dict[Source, Label] = dict(outside or {})
    copies = weight_copies(kind)
    tables = _split_tables(kind, ways)
    results: list[Label] = []
    work: list[bool] = []
    summed: list[int] = []
    read_by_columns: dict[Source, int] = {}
    for number, op in enumerate(kind.ops):
        way = way_of(op, ways, copies)
        inputs = [known.get(source, "whole") for source in op.inputs if copies.get(source, source) not in ways]
        label: Label = "split" if "split" in inputs else "whole"
        if number in copies:
            label = "split" if way else "whole"
        elif op.phase == "forward":
            if way == "column":
                label = "split"
                if reads_stream(op):
                    read_by_columns.setdefault(activation_of(op, kind, copies), number)
            elif way == "heads":
                label = "split"
            elif way in ("row", "table"):
                label = "whole"
                summed.append(number)
        elif way == "row" or (op.name == "embedding_dense_backward" and op.result_shape in tables):
            label = "split"  # a table's gradient reads the stream's gradient and token ids: the shape tells whose it is
        elif way == "column":
            label = "whole"
        known[number] = label
        results.append(label)
        work.append(way is not None or label == "split" or "split" in inputs)
    return Labels(
        results=tuple(results),
        work_split=tuple(work),
        reduced_forward=tuple(summed),
        reduced_backward=tuple(read_by_columns.values()),
        outside=dict(outside or {}),
    )


@cached_in_value
def weight_copies(kind: Kind) -> dict[Source, str]:
    """Ops that only copy a parameter into another dtype → the parameter's name."""
    return {
        number: op.inputs[0]
        for number, op in enumerate(kind.ops)
        if op.kind == "copy" and len(op.inputs) == 1 and isinstance(op.inputs[0], str) and not is_outer(op.inputs[0])
    }


def way_of(op: Op, ways: dict[str, Way], copies: dict[Source, str]) -> Way | None:
    names = (copies.get(source, source) for source in op.inputs)
    return next((ways[name] for name in names if isinstance(name, str) and name in ways), None)


def reads_stream(op: Op) -> bool:
    """Whether a gradient flows back through what a weight is applied to: none does into the batch."""
    return "@batch" not in op.inputs


def activation_of(op: Op, kind: Kind, copies: dict[Source, str]) -> Source:
    """The tensor a weight is applied to, before it was copied into another dtype for that weight alone."""
    made: list[Source] = [source for source in op.inputs if isinstance(source, int) and source not in copies]
    source = made[0] if made else "@input"
    while isinstance(source, int) and kind.ops[source].kind == "copy" and len(kind.ops[source].inputs) == 1:
        source = kind.ops[source].inputs[0]
    return source


def _split_tables(kind: Kind, ways: dict[str, Way]) -> set[Shape]:
    """Shapes of the tables that are split by their rows."""
    return {
        shape
        for _, op in kind.forward_ops
        if op.name == "embedding"
        for source, shape in zip(op.inputs, op.input_shapes, strict=False)
        if isinstance(source, str) and ways.get(source) == "table"
    }


def is_outer(source: Source) -> bool:
    """Whether another block made it."""
    return isinstance(source, str) and source.startswith("@")
