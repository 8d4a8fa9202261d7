"""Cutting a model into stages: consecutive, even, fewer at the ends, everything somewhere."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import hand_graph, quick

from meshwright.core.errors import PlanError
from meshwright.core.graph import Block, Graph
from meshwright.core.names import expand_names
from meshwright.core.plan import Stage
from meshwright.rules.stages import even_stages, plain_virtual


def graph_of(*names: str) -> Graph:
    """Blocks in order; those with a number in their name are repeated."""
    blocks = (Block(name=n, kind="outside", repeated=any(part.isdigit() for part in n.split("."))) for n in names)
    return msgspec.structs.replace(hand_graph(), blocks=(Block(name="", kind="outside", repeated=False), *blocks))


def gpt(num_layers: int) -> Graph:
    return graph_of("embed", *(f"blocks.{i}" for i in range(num_layers)), "norm", "head")


def layers(stages: tuple[Stage, ...]) -> list[int]:
    return [sum(name.startswith("blocks.") for name in expand_names(stage.blocks)) for stage in stages]


@pytest.mark.parametrize(
    ("num_layers", "pp", "virtual", "counts"),
    [
        (106, 12, 1, [8, *[9] * 10, 8]),
        (82, 12, 1, [6, *[7] * 10, 6]),
        (72, 12, 1, [6] * 12),
        (105, 35, 3, [1] * 105),
        (7, 4, 1, [2, 2, 2, 1]),
        (5, 4, 1, [1, 2, 1, 1]),
        (9, 2, 2, [2, 3, 2, 2]),
        (4, 1, 1, [4]),
    ],
)
def test_repeated_blocks_are_even_and_the_ends_hold_fewer(
    num_layers: int, pp: int, virtual: int, counts: list[int]
) -> None:
    schedule = "interleaved" if virtual > 1 else "1f1b"
    assert layers(even_stages(gpt(num_layers), pp, virtual, schedule)) == counts


@quick
@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 3))
def test_every_block_is_in_one_stage_and_in_order(num_layers: int, pp: int, virtual: int) -> None:
    graph = gpt(num_layers)
    if num_layers < pp * virtual and pp * virtual > 1:
        with pytest.raises(PlanError, match=f"set pp · virtual to {num_layers} or less"):
            even_stages(graph, pp, virtual, "interleaved")
        return
    stages = even_stages(graph, pp, virtual, "interleaved")
    names = [name for stage in stages for name in expand_names(stage.blocks)]
    assert names == [block.name for block in graph.blocks if block.name]
    assert [stage.coordinate for stage in stages] == [number % pp for number in range(pp * virtual)]
    counts = layers(stages)
    assert max(counts) - min(counts) <= 1
    steps = [after - before for before, after in pairwise(counts) if after != before]
    assert steps in ([], [-1], [1, -1])  # fewer at the ends, at the last one first
    assert counts[-1] <= counts[0]


def test_other_blocks_go_with_the_repeated_one_before_them() -> None:
    graph = graph_of("embed", "drop", "blocks.0", "blocks.1", "pool", "blocks.2", "blocks.3", "norm", "head")
    assert even_stages(graph, 2, 1, "1f1b") == (
        Stage(coordinate=0, blocks=("embed", "drop", "blocks.0-1", "pool")),
        Stage(coordinate=1, blocks=("blocks.2-3", "norm", "head")),
    )


def test_an_encoder_and_a_decoder_are_one_row() -> None:
    encoder = [f"encoder.block.{i}" for i in range(12)]
    decoder = [f"decoder.block.{i}" for i in range(12)]
    graph = graph_of("shared", *encoder, "encoder.norm", *decoder, "decoder.norm", "lm_head")
    assert even_stages(graph, 4, 1, "1f1b") == (
        Stage(coordinate=0, blocks=("shared", "encoder.block.0-5")),
        Stage(coordinate=1, blocks=("encoder.block.6-11", "encoder.norm")),
        Stage(coordinate=2, blocks=("decoder.block.0-5",)),
        Stage(coordinate=3, blocks=("decoder.block.6-11", "decoder.norm", "lm_head")),
    )
    across = even_stages(graph, 3, 1, "1f1b")[1]
    assert across.blocks == ("encoder.block.8-11", "encoder.norm", "decoder.block.0-3")


@pytest.mark.parametrize(
    ("schedule", "virtual", "coordinates"),
    [
        ("1f1b", 1, [0, 1, 2]),
        ("interleaved", 2, [0, 1, 2, 0, 1, 2]),
        ("breadth-first", 2, [0, 1, 2, 0, 1, 2]),
        ("zbv", 2, [0, 1, 2, 2, 1, 0]),
        ("dualpipev", 2, [0, 1, 2, 2, 1, 0]),
    ],
)
def test_stages_lie_in_a_loop_or_a_v(schedule: str, virtual: int, coordinates: list[int]) -> None:
    assert plain_virtual(schedule) == virtual
    assert [stage.coordinate for stage in even_stages(gpt(12), 3, virtual, schedule)] == coordinates


def test_one_stage_needs_nothing_repeated() -> None:
    assert even_stages(graph_of("stem", "head"), 1, 1, "1f1b") == (Stage(coordinate=0, blocks=("stem", "head")),)
    with pytest.raises(
        PlanError,
        match=r"has 0 repeated blocks \(modules of a list; .* is none\): set pp · virtual to 1 or less, or give the stages",
    ):
        even_stages(graph_of("stem", "head"), 2, 1, "1f1b")
