"""Which forward ops may read split tensors, decided from the graph by the rules of the runtime (runtime/split).

    may read split tensors   element-wise ops; attention and what is in it (heads are split, tokens are not); batch norm,
                             depthwise filters, pooling and sums by channel; the loss over a split vocabulary
    needs whole tensors      everything else: norms over features, sums over them, joins and picks outside attention,
                             products of activations outside attention, and ops that read a trained parameter of their own

The runtime could gather a split tensor for an op that needs it whole. The cost of that is not in the labels
(rules/labels.py), so such shardings are not proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from meshwright.core.graph import Kind, Op, Shape, Source
from meshwright.rules.sharding import is_depthwise
from meshwright.searching.sharding.units import Unit

PLAIN_COPIES = ("clone", "_to_copy", "copy", "copy_", "contiguous", "detach", "alias")
NO_GRADIENT = (
    "bernoulli_", "arange", "ones_like", "zeros_like", "full_like", "rand_like", "randn_like", "empty_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "one_hot", "logical_not", "bitwise_not",
    "isnan", "isinf", "sign",
)  # fmt: skip
"""Ops whose result no gradient flows through."""
CHANNEL_DIM = 1
LOSS_DIMS = 2
"""Logits that the loss can read split have two dims: tokens and classes."""


class Reads:
    """The answers for one unit. The ops must be given to `follow` in order."""

    def __init__(self, unit: Unit, is_moving: Callable[[Source], bool]) -> None:
        """is_moving: whether a gradient flows back into a tensor that another block made."""
        self.unit = unit
        self._outer = is_moving
        self._moving: dict[int, bool] = {}
        self._channels: set[int] = set()
        self._losses = _losses(unit.kind)

    def follow(self, number: int) -> None:
        """Notes whether a gradient flows through an op's result, and whether the result has channels."""
        op = self.unit.kind.ops[number]
        streams = (source for source in op.inputs if source != "@input" or op.region != "attention")
        self._moving[number] = op.name not in NO_GRADIENT and any(self._flows(source) for source in streams)
        sources = [source for source in op.inputs if isinstance(source, int) and source in self._channels]
        keeps = any(len(self.unit.kind.ops[source].result_shape) == len(op.result_shape) for source in sources)
        if op.kind == "convolution" or keeps:
            self._channels.add(number)

    def is_moving(self, number: int) -> bool:
        return self._moving[number]

    def _flows(self, source: Source) -> bool:
        parameter = self.unit.parameter_of(source)
        if parameter is not None:
            return parameter.trainable
        return self._moving[source] if isinstance(source, int) else self._outer(source)

    def partners(self, number: int) -> list[Source]:
        """The inputs of an op that must be split alike: those that a gradient flows into, since splitting a whole one costs a
        gather of its gradient. Left out are broadcast inputs, and inputs of attention from outside its block: these are
        masks, positions or biases, which have no gradient or are split by heads as the attention is."""
        op = self.unit.kind.ops[number]
        most = _elements(op.result_shape)
        broadcast = {
            source
            for source, shape in zip(op.inputs, op.input_shapes, strict=False)
            if source == "@input" and (op.region == "attention" or _elements(shape) < most)
        }
        sources = dict.fromkeys(self.unit.activations(op))
        return [source for source in sources if self._flows(source) and source not in broadcast]

    def may_split(self, number: int) -> bool:
        """Whether an op that applies no weight can work on split tensors."""
        op = self.unit.kind.ops[number]
        if not op.result_shape:
            return True  # a number: the loss
        own = [parameter for source in op.inputs if (parameter := self.unit.parameter_of(source)) is not None]
        if "batch_norm" in op.name:
            return True
        if any(p.trainable for p in own):
            return op.kind == "convolution" and any(is_depthwise(op, p) for p in own if len(p.shape) > 1)
        return self._splits(op, number)

    def _splits(self, op: Op, number: int) -> bool:
        in_attention = op.region == "attention"
        match op.kind:
            case "elementwise" | "transcendental" | "attention":
                return True
            case "matmul":
                return in_attention
            case "copy":
                return in_attention or op.name in PLAIN_COPIES
            case "normalisation":
                by_channel = "pool" in op.name and self._has_channels(op)
                return number in self._losses or by_channel or (in_attention and "softmax" in op.name)
            case "reduction":
                kept = (
                    op.result_shape[CHANNEL_DIM : CHANNEL_DIM + 1] == op.input_shapes[0][CHANNEL_DIM : CHANNEL_DIM + 1]
                )
                return kept and self._has_channels(op)
            case _:
                return False

    def _has_channels(self, op: Op) -> bool:
        return all(source in self._channels for source in self.unit.activations(op))


def _losses(kind: Kind) -> set[int]:
    """Log-softmaxes over [tokens, classes] that only a loss reads."""
    readers: dict[Source, set[str]] = {}
    for op in kind.ops:
        if op.phase == "forward":
            for source in op.inputs:
                readers.setdefault(source, set()).add(op.name)
    return {
        number
        for number, op in enumerate(kind.ops)
        if op.phase == "forward"
        and op.name == "_log_softmax"
        and len(op.result_shape) == LOSS_DIMS
        and readers.get(number) == {"nll_loss_forward"}
    }


def _elements(shape: Shape) -> float:
    """Elements for two samples, so that tensors that all samples share have fewer."""
    return prod(dim.at(2) for dim in shape)
