"""Bytes of activations that a model keeps for backward, by block and by recompute mode.

    none        all bytes in use when forward ends                 Σ kept of the forward passes
    selective   without the tensors only the attention core needs  none - selective_freed_bytes
    full        repeated blocks keep only their outputs            Σ output_bytes of the forward passes

Selective recompute runs the attention core again (ops of region `attention`). It frees the tensors these ops save, except the
core's result, which later ops read; and it keeps the inputs of the recomputed ops, even where backward would not need them.
"""

from __future__ import annotations

import msgspec

from meshwright.core.graph import Graph, Kind
from meshwright.cost.compute.recomputed_ops import dropped_ops, kept_for_core


class Activations(msgspec.Struct, frozen=True):
    """Bytes kept at the end of forward, under each recompute mode."""

    none: float
    selective: float
    full: float


def selective_freed_bytes(kind: Kind, num_samples: int) -> float:
    """Bytes that selective recompute frees in one block."""
    freed = sum(kind.ops[number].saved_bytes.at(num_samples) for number in dropped_ops(kind))
    added = sum(kind.ops[number].written_bytes.at(num_samples) for number in kept_for_core(kind))
    return freed - added


def activations_by_block(graph: Graph, num_samples: int) -> dict[str, Activations]:
    """Bytes that each block keeps, less the bytes it frees of other blocks. Only repeated blocks are recomputed in full."""
    kinds = graph.kind_by_block
    found: dict[tuple[str, bool], Activations] = {}
    for block in graph.blocks:
        key, kind = (block.kind, block.repeated), kinds[block.name]
        if key not in found:
            forward = [step for step in kind.passes if step.phase == "forward"]
            none = sum(step.kept_at(num_samples) for step in forward)
            handed_on = sum(step.output_bytes.at(num_samples) for step in forward)
            selective = none - selective_freed_bytes(kind, num_samples)
            found[key] = Activations(none, selective, handed_on if block.repeated else none)
    return {block.name: found[block.kind, block.repeated] for block in graph.blocks}


def total_activations(graph: Graph, num_samples: int) -> Activations:
    rows = map(msgspec.structs.astuple, activations_by_block(graph, num_samples).values())
    return Activations(*map(sum, zip((0.0, 0.0, 0.0), *rows, strict=True)))
