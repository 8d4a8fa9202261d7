"""Bytes a model keeps for backward, by block and by how much is recomputed.

    none        what is in use when forward ends         Σ kept of the forward passes
    selective   less what only the attention core needs  none - redone_bytes
    full        of repeated blocks what they hand on     Σ output_bytes of the forward passes

Selective recompute runs the attention core again (ops of region `attention`). It frees what those ops save, except what is
read outside the core, its result; and it keeps what the redone ops read, even where backward would not have needed that.
"""

from __future__ import annotations

import msgspec

from meshwright.core.graph import Graph, Kind
from meshwright.cost.compute.recomputed_ops import dropped_ops, kept_for_core


class Activations(msgspec.Struct, frozen=True):
    """Bytes kept at the end of forward, under each kind of recompute."""

    none: float
    selective: float
    full: float


def block_activations(kind: Kind, repeated: bool, num_samples: int) -> Activations:
    """What one block keeps, less what it frees of other blocks. Only repeated blocks are recomputed in full."""
    forward = [step for step in kind.passes if step.phase == "forward"]
    none = sum(step.kept_at(num_samples) for step in forward)
    handed_on = sum(step.output_bytes.at(num_samples) for step in forward)
    return Activations(none, none - selective_freed_bytes(kind, num_samples), handed_on if repeated else none)


def selective_freed_bytes(kind: Kind, num_samples: int) -> float:
    """What selective recompute frees of one block."""
    freed = sum(kind.ops[number].saved_bytes.at(num_samples) for number in dropped_ops(kind))
    added = sum(kind.ops[number].written_bytes.at(num_samples) for number in kept_for_core(kind))
    return freed - added


def activations_by_block(graph: Graph, num_samples: int) -> dict[str, Activations]:
    kinds = graph.kind_by_block
    found: dict[tuple[str, bool], Activations] = {}
    for block in graph.blocks:
        key = (block.kind, block.repeated)
        if key not in found:
            found[key] = block_activations(kinds[block.name], block.repeated, num_samples)
    return {block.name: found[block.kind, block.repeated] for block in graph.blocks}


def total_activations(graph: Graph, num_samples: int) -> Activations:
    blocks = activations_by_block(graph, num_samples).values()
    return Activations(
        none=sum(block.none for block in blocks),
        selective=sum(block.selective for block in blocks),
        full=sum(block.full for block in blocks),
    )
