"""Where cp finds the tokens of a sample.

    looked up    a text model looks up ids of the batch: [samples, tokens] are cut there                      -> looked_up_tokens
    in blocks    a model of images or sound makes its tokens by convolutions. Its repeated blocks that attend over a tensor
                 [samples, tokens, width] cut what they are called with; all else is done whole, on every rank  -> token_runs

Blocks that hand each other what they make, and nobody else, are a *run*: tokens are cut where it begins and gathered where it ends.
Where the flow between blocks was not followed (a model that leaves out layers at random), the blocks of a list are taken for one.
A plan names a run in one pattern: a run that takes two patterns is two.

A block counts if each of its attentions is over all tokens of the tensor it is called with, and nothing else in it mixes them: no
convolution, no window, no keys of another number. One that attends otherwise refuses cp for the model, with the reason.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple

from meshwright.core.flow import Affine, Flow, FlowTensor
from meshwright.core.graph import Graph, Kind, Op, Shape
from meshwright.core.names import compact_names, expand_names
from meshwright.rules.context import FUSED_DIMS, num_heads
from meshwright.rules.kinds import cached_in_value

STREAM_DIMS = 3
"""Samples, tokens, width."""


class TokenBlocks(NamedTuple):
    """The blocks that cut tokens which the model does not look up."""

    runs: tuple[tuple[str, ...], ...] = ()
    refusal: str = ""
    """Why there are no runs."""

    @property
    def blocks(self) -> frozenset[str]:
        return frozenset(name for run in self.runs for name in run)

    @property
    def names(self) -> tuple[str, ...]:
        """The runs as a plan writes them: one entry a run."""
        return tuple(pattern for run in self.runs for pattern in compact_names(run))


def looked_up_tokens(graph: Graph) -> int:
    """Tokens of a sample that the model looks up; the fewest, where it has several inputs. 0: it looks up nothing."""
    return min(looked_up_counts(graph), default=0)


@cached_in_value
def looked_up_counts(graph: Graph) -> frozenset[int]:
    """Tokens of a sample, of each input whose ids the model looks up."""
    return frozenset(
        round(shape[-1].fixed)
        for kind in graph.kinds
        for _, op in kind.forward_ops
        if op.name == "embedding" and "@batch" in op.inputs
        for shape in op.input_shapes[1:2]
        if len(shape) == 2 and shape[0].per_sample
    )


def cut_in_blocks(graph: Graph, cp: int) -> TokenBlocks | None:
    """The blocks that cut their tokens over cp; None where the looked-up tokens are cut, so that all blocks have parts of them."""
    return tokens_in_blocks(graph) if cp > 1 and not looked_up_tokens(graph) else None


def token_names(graph: Graph, cp: int) -> tuple[str, ...]:
    """The `token_blocks` of a plan with this degree."""
    found = cut_in_blocks(graph, cp)
    return found.names if found is not None else ()


@cached_in_value
def tokens_in_blocks(graph: Graph) -> TokenBlocks:
    """The blocks that cut tokens over cp, in a graph that looks up no tokens."""
    kinds = graph.kind_by_block
    attending = [name for name in graph.repeated_blocks if _attentions(kinds[name])]
    if not attending:
        return TokenBlocks(refusal="none of its repeated blocks attends over tokens")
    for name in attending:
        if reason := _refusal(kinds[name]):
            return TokenBlocks(refusal=f"block '{name}' {reason}")
    calls = Counter(event.block for event in graph.flow.events if event.reads) if graph.flow else Counter[str]()
    twice = next((name for name in attending if calls[name] > 1), None)
    if twice is not None:
        return TokenBlocks(refusal=f"block '{twice}' is called {calls[twice]} times in a forward")
    follows = graph.flow is not None and all(calls[name] for name in attending)
    runs = _runs(graph.flow, attending) if graph.flow and follows else [attending]
    return TokenBlocks(tuple(expand_names([pattern]) for run in runs for pattern in compact_names(run)))


def _runs(flow: Flow, attending: list[str]) -> list[list[str]]:
    """Runs of attending blocks, in the order of their calls; a block whose result other blocks read too ends a run."""
    order = [event.block for event in flow.events if event.block in attending and event.reads]
    makers = {number: event.block for event in flow.events for number in event.makes if event.reads}
    readers: dict[str, set[str]] = {name: set() for name in order}
    for event in flow.events:
        for number in event.reads:
            if makers.get(number) in readers:
                readers[makers[number]].add(event.block)
    runs: list[list[str]] = []
    for before, name in zip(["", *order], order, strict=False):
        if runs and readers[before] and readers[before] <= set(order):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


# ---------------------------------------------------------------- kinds


@cached_in_value
def stream_of(kind: Kind) -> Shape | None:
    """The tensor [samples, tokens, width] a block is called with; None where there is none, or several of different tokens."""
    found = [
        shape
        for _, op in kind.forward_ops
        for source, shape in zip(op.inputs, op.input_shapes, strict=True)
        if source == "@input" and len(shape) == STREAM_DIMS and shape[0] == Affine(0.0, 1.0)
    ]
    return found[0] if len({shape[1] for shape in found}) == 1 else None


@cached_in_value
def output_tensors(kind: Kind) -> tuple[FlowTensor, ...]:
    """The output of a block of a run: the last tensor [samples, tokens, width] that it makes."""
    stream = stream_of(kind)
    made = [op for _, op in kind.forward_ops if stream and _size(op.result_shape) == _size(stream)]
    needs_gradient = any(op.phase == "backward" for op in kind.ops)
    return tuple(FlowTensor(_result_bytes(op), needs_gradient) for op in made[-1:])


def _result_bytes(op: Op) -> Affine:
    """Bytes of an op's first result; a norm writes its statistics in addition."""
    elements = _size(op.result_shape)
    item = next((item for item in (8, 4, 2) if item * elements <= op.written_bytes.at(1)), 1)
    return Affine(0.0, item * elements)


def _size(shape: Shape) -> float:
    """Elements of one sample."""
    return prod(dim.at(1) for dim in shape)


@cached_in_value
def _attentions(kind: Kind) -> tuple[Op, ...]:
    return tuple(op for _, op in kind.forward_ops if num_heads(op)[0])


def _refusal(kind: Kind) -> str:
    """Why an attending block cannot be part of a run; empty where it can."""
    stream = stream_of(kind)
    if stream is None:
        return "is not called with one tensor [samples, tokens, width]"
    tokens = round(stream[1].fixed)
    if any(op.kind == "convolution" for op in kind.ops):
        return "mixes its tokens by a convolution"
    for place, op in enumerate(_attentions(kind)):
        counts = _counts(op, place)
        if any(count != tokens for count in counts):
            return (
                f"attends over {' and '.join(map(str, sorted(counts)))} tokens (windows, or reduced keys) of {tokens}"
            )
    if any(_is_grid(shape, tokens) for op in kind.ops for shape in (*op.input_shapes, op.result_shape)):
        return f"arranges its {tokens} tokens in a grid"
    if not output_tensors(kind):
        return "hands on no tensor as large as the one it is called with"
    return ""


def _is_grid(shape: Shape, tokens: int) -> bool:
    """Whether a shape has four dims none of which is the tokens: rows and columns of an image, or windows."""
    of_samples = len(shape) > STREAM_DIMS and shape[0].per_sample > 0
    return of_samples and all(round(dim.fixed) != tokens for dim in shape[1:])


def _counts(op: Op, place: int) -> set[int]:
    """The numbers of tokens an attention has: of queries, and of keys.

    Explicit attention makes scores [samples · heads, queries, keys] first, and reads them next. place: of the op among all."""
    if op.kind == "attention":
        return {round(shape[2].fixed) for shape in op.input_shapes[:3] if len(shape) == FUSED_DIMS}
    scores = op.input_shapes[0] if place % 2 else op.result_shape
    return {round(dim.fixed) for dim in scores[1:]}
