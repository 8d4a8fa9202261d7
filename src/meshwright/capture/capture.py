"""nn.Module and example batch → Graph.

The module is followed with 2 and with 3 samples; every quantity q becomes affine, q(n) = fixed + per_sample · n, with
per_sample = q(3) - q(2). (One sample is not used: batch norm refuses it and matmuls take other paths.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import TypeVar

import msgspec
import torch
from torch import nn

from meshwright.capture.blocks import block_of_parameter, find_blocks
from meshwright.capture.trace import Recording, TracedOp, trace
from meshwright.core.errors import CaptureError, ModelError
from meshwright.core.graph import Affine, Block, Graph, Kind, Op, Parameter, Phase, Precision, Segment
from meshwright.models.objective import DEFAULT, Batch, Objective
from meshwright.models.parameters import list_parameters
from meshwright.models.source import ModelSource, repeat_samples

FEW, MORE = 2, 3

T = TypeVar("T")


def capture(
    module: nn.Module, batch: Batch, objective: Objective = DEFAULT, name: str = "", precision: Precision = "fp32"
) -> Graph:
    """Follow a module on fake tensors; its own tensors may be on any device, also `meta`."""
    blocks = find_blocks(module)
    example = repeat_samples(batch)
    few, more = (trace(module, example(samples), objective, blocks, precision) for samples in (FEW, MORE))
    kinds, block_values = _kinds(module, blocks, _paired_ops(few, more))
    return Graph(
        model=name or type(module).__name__,
        precision=precision,
        parameters=_parameters(module, blocks),
        kinds=kinds,
        blocks=block_values,
        timeline=_timeline(few, more),
        buffer_bytes=few.buffer_bytes,
        batch_bytes=affine(few.batch_bytes, more.batch_bytes),
        tokens_per_sample=max(1, objective.count(example(FEW)) // FEW),
        gradient_order=tuple(few.gradient_order),
    )


def capture_source(source: ModelSource, precision: Precision = "fp32") -> Graph:
    """Capture a named model without giving it memory."""
    if source.example is None:
        raise ModelError(f"{source.name} returned a module alone: return (module, batch) so that it can be followed")
    with torch.device("meta"):
        module = source.build()
    return capture(module, source.example(FEW), source.objective, source.name, precision)


def affine(few: float, more: float) -> Affine:
    per_sample = (more - few) / (MORE - FEW)
    return Affine(few - per_sample * FEW, per_sample)


def _parameters(module: nn.Module, blocks: dict[str, bool]) -> tuple[Parameter, ...]:
    listed = list_parameters(module)
    named = {parameter.name: block_of_parameter(parameter.name, blocks) for parameter in listed}
    return tuple(
        Parameter(
            name=parameter.name,
            shape=parameter.shape,
            dtype=parameter.dtype,
            trainable=parameter.trainable,
            tied_to=parameter.tied_to,
            block=named[parameter.name],
        )
        for parameter in listed
    )


def _paired_ops(few: Recording, more: Recording) -> dict[str, Counter[Op]]:
    """Ops by block, each as an affine op, identical ones counted."""
    found: dict[str, Counter[Op]] = {}
    for one, other in _pair(few.ops, more.ops, "ops"):
        if (one.name, one.phase, one.block) != (other.name, other.phase, other.block):
            raise _depends_on_batch(f"op {one.name} in block '{one.block}' became {other.name}")
        found.setdefault(one.block, Counter())[_op(one, other)] += 1
    return found


def _op(one: TracedOp, other: TracedOp) -> Op:
    return Op(
        name=one.name,
        kind=one.kind,
        phase=one.phase,
        dtype=one.dtype,
        count=1,
        flops=affine(one.flops, other.flops),
        read_bytes=affine(one.read_bytes, other.read_bytes),
        written_bytes=affine(one.written_bytes, other.written_bytes),
    )


def _kinds(
    module: nn.Module, blocks: dict[str, bool], ops: dict[str, Counter[Op]]
) -> tuple[tuple[Kind, ...], tuple[Block, ...]]:
    """Blocks with the same class and the same ops share a kind."""
    names: dict[tuple[str, tuple[Op, ...]], str] = {}
    taken: Counter[str] = Counter()
    placed = []
    for name in ["", *blocks]:
        word = type(module.get_submodule(name)).__name__
        work = tuple(_counted(op, count) for op, count in ops.get(name, Counter()).items())
        if (word, work) not in names:
            taken[word] += 1
            names[word, work] = word if taken[word] == 1 else f"{word}#{taken[word]}"
        placed.append(Block(name=name, kind=names[word, work], repeated=blocks.get(name, False)))
    return tuple(Kind(name=kind, ops=work) for (_, work), kind in names.items()), tuple(placed)


def _counted(op: Op, count: int) -> Op:
    return msgspec.structs.replace(op, count=count)


def _timeline(few: Recording, more: Recording) -> tuple[Segment, ...]:
    segments = []
    for one, other in _pair(_stretches(few), _stretches(more), "stretches of memory"):
        (phase, block), levels = one
        moments = [affine(*pair) for pair in _pair(levels, other[1], "memory events")]
        segments.append(
            Segment(
                phase=phase,
                block=block,
                kept_bytes=moments[-1],
                peak_bytes=fullest([Affine(0.0, 0.0), *moments]),
                output_bytes=affine(few.output_bytes.get(block, 0), more.output_bytes.get(block, 0)),
            )
        )
    return tuple(segments)


def _stretches(recording: Recording) -> list[tuple[tuple[Phase, str], list[int]]]:
    """Runs of events in one phase and block → (place, bytes in use after each event); gradients left out."""
    events = [event for event in recording.memory if event.storage not in recording.gradient_storages]
    runs = groupby(events, key=lambda event: (event.phase, event.block))
    return [(place, list(accumulate(event.num_bytes for event in run))) for place, run in runs]


def fullest(moments: Iterable[Affine]) -> tuple[Affine, ...]:
    """The moments that are the fullest for some number of samples: none is at most another in both its parts."""
    kept: list[Affine] = []
    for moment in sorted(set(moments), key=lambda m: (-m.per_sample, -m.fixed)):
        if not kept or moment.fixed > kept[-1].fixed:
            kept.append(moment)
    return tuple(kept)


def _pair(few: list[T], more: list[T], what: str) -> Iterable[tuple[T, T]]:
    if len(few) != len(more):
        raise _depends_on_batch(f"{len(few)} {what} with {FEW} samples, {len(more)} with {MORE}")
    return zip(few, more, strict=True)


def _depends_on_batch(said: str) -> CaptureError:
    return CaptureError(
        f"the module does other work for other batch sizes ({said}): its cost cannot be scaled; "
        "remove the dependence on the batch size, or write the plan by hand"
    )
