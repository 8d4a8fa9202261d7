"""What compiling fuses, and that it never costs time or memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from machines import named_machine, plan_for
from strategies import quick
from transformer import Sizes, transformer_graph
from writer import Writer, shape_of

from meshwright.core.graph import Affine, Kind
from meshwright.cost.compute.fusion import fused_groups
from meshwright.cost.estimate import estimate

WIDE = shape_of("n", 100)
SIZE = 400.0
"""Bytes of one tensor of this shape, one sample."""


def chain() -> Kind:
    """scale, shift, a matmul, and a bend behind it."""
    writer = Writer("Chain", "fp32")
    x = writer.outside("@input", WIDE, freed=False)
    scaled = writer.op("forward", "mul", "elementwise", [x], WIDE)
    shifted = writer.op("forward", "add", "elementwise", [scaled, x], WIDE)
    product = writer.op(
        "forward", "mm", "matmul", [shifted, ("weight", shape_of(100, 100))], WIDE, flops=Affine(0.0, 2e4)
    )
    bent = writer.op("forward", "gelu", "transcendental", [product], WIDE)
    writer.hand_on(bent, saved=False)
    arriving = writer.outside("@input", WIDE, freed=True)
    back = writer.op("backward", "gelu_backward", "transcendental", [arriving, product], WIDE)
    writer.hand_on(back, saved=False)
    return writer.kind(("forward", 4), ("backward", 1))


def test_neighbours_that_only_move_bytes_are_one_kernel() -> None:
    found = fused_groups(chain())
    assert sorted(found.members.values()) == [(0, 1), (3,), (4,)], "a matmul, and the end of a phase, part groups"


def test_a_group_reads_what_comes_from_outside_and_writes_what_is_needed() -> None:
    found = fused_groups(chain())
    assert found.written == {1, 3, 4}, "what only the next of the group reads is never in memory"
    assert found.bytes_at(0, 1) == pytest.approx(3 * SIZE), "the input for either op, and the result"
    assert found.bytes_at(3, 1) == pytest.approx(2 * SIZE)
    assert found.bytes_at(4, 2) == pytest.approx(2 * 3 * SIZE)


def test_backward_keeps_what_is_in_memory_anyway_and_computes_the_rest_again() -> None:
    assert fused_groups(chain()).kept_ops == {2}
    block = transformer_graph(attention="eager", dropout=True).kind_by_block["blocks.0"]
    fused = fused_groups(block)
    assert {number for number in fused.kept_ops if number in fused.group_of} <= fused.written
    assert not any(fused.is_never_written(number) for number in fused.kept_ops)
    assert any(fused.is_never_written(number) and op.saved_bytes.per_sample for number, op in enumerate(block.ops))


def test_tables_are_not_fused() -> None:
    kinds = {kind.name: kind for kind in transformer_graph().kinds}
    assert fused_groups(kinds["Embedding"]).group_of == {}


layouts = st.sampled_from(
    [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}, {"dp": 2, "zero": 3, "global_batch": 2}]
)


@quick
@given(
    st.builds(
        Sizes,
        hidden=st.sampled_from([64, 256]),
        heads=st.just(4),
        seq=st.sampled_from([32, 128]),
        attention=st.sampled_from(["fused", "eager"]),
        dropout=st.booleans(),
    ),
    layouts,
    st.sampled_from(["none", "selective", "full"]),
)
def test_compiling_never_needs_more_time_or_memory(sizes: Sizes, layout: dict[str, Any], recompute: str) -> None:
    assume(sizes.attention == "fused" or "cp" not in layout)
    graph = transformer_graph(sizes)
    eager, compiled = (
        estimate(graph, plan_for(graph, **layout, recompute=recompute, compile=on), named_machine())
        for on in (False, True)
    )
    assert compiled.step_seconds <= eager.step_seconds
    assert compiled.peak_bytes <= eager.peak_bytes
    assert compiled.collectives == eager.collectives
