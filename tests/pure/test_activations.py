"""Bytes kept for backward, on a block written by hand: projection, core of three ops, projection."""

from __future__ import annotations

from meshwright.core.graph import Affine, Block, Graph, Kind, MemoryEvent, Op, Pass, Region, Segment, Source
from meshwright.cost.memory.activations import activations_by_block, selective_freed_bytes, total_activations


def op(name: str, *inputs: Source, saved: int, region: Region = "", written: int = 10) -> Op:
    return Op(
        name=name, kind="elementwise", phase="forward", region=region, inputs=inputs, written_bytes=Affine(0, written),
        saved_bytes=Affine(0, saved),
    )  # fmt: skip


def block(query_saved: int) -> Kind:
    """The core reads `query`, saves scores and weights, and hands its result to `out`."""
    ops = (
        op("query", "@input", "weight", saved=query_saved),
        op("scores", 0, saved=100, region="attention"),
        op("weights", 1, saved=100, region="attention"),
        op("mix", 2, saved=10, region="attention"),
        op("out", 3, "weight", saved=10),
    )
    kept = sum(one.saved_bytes.per_sample for one in ops)
    forward = Pass(phase="forward", num_ops=5, events=(MemoryEvent(0, Affine(0, kept)),), output_bytes=Affine(0, 10))
    backward = Pass(phase="backward", events=(MemoryEvent(0, Affine(0, -kept)),))
    return Kind(name="Block", ops=ops, passes=(forward, backward))


def graph(kind: Kind) -> Graph:
    head = Kind(name="Head", ops=(), passes=(Pass(phase="forward", events=(MemoryEvent("@input", Affine(3, 5)),)),))
    blocks = tuple(Block(name=f"blocks.{number}", kind="Block", repeated=True) for number in range(4))
    return Graph(
        model="hand", parameters=(), kinds=(kind, head),
        blocks=(*blocks, Block(name="head", kind="Head", repeated=False)),
        timeline=(Segment("head", 0),), buffer_bytes=0, batch_bytes=Affine(0, 1), tokens_per_sample=1,
    )  # fmt: skip


def test_what_the_core_alone_needs_is_redone() -> None:
    """Scores and weights go; the core's result is read by the projection after it and stays."""
    assert selective_freed_bytes(block(query_saved=10), 1) == 200
    assert selective_freed_bytes(block(query_saved=10), 3) == 600


def test_what_the_core_reads_must_then_be_kept() -> None:
    assert selective_freed_bytes(block(query_saved=0), 1) == 200 - 10


def test_a_core_that_saves_nothing_of_its_own_frees_nothing() -> None:
    fused = Kind(name="Block", ops=(op("query", "@input", saved=10), op("mix", 0, saved=9, region="attention"),
                                    op("out", 1, saved=0)))  # fmt: skip
    assert selective_freed_bytes(fused, 4) == 0


def test_by_block_and_in_all() -> None:
    made = graph(block(query_saved=10))
    found = activations_by_block(made, 2)
    assert (found["blocks.3"].none, found["blocks.3"].selective, found["blocks.3"].full) == (460, 60, 20)
    assert (found["head"].none, found["head"].selective, found["head"].full) == (13, 13, 13)
    total = total_activations(made, 2)
    assert (total.none, total.selective, total.full) == (4 * 460 + 13, 4 * 60 + 13, 4 * 20 + 13)
