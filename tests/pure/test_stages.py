"""Cutting a model into stages: consecutive, even, fewer at the ends, everything somewhere."""

from __future__ import annotations

import re
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
from meshwright.core.request import Ends
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


@pytest.mark.parametrize(
    ("num_layers", "pp", "virtual", "ends", "counts"),
    [
        (126, 16, 8, "own", [0, *[1] * 126, 0]),  # Llama 3.1 405B
        (126, 16, 8, "fewer", [0, *[1] * 126, 0]),
        (126, 16, 1, "fewer", [7, *[8] * 14, 7]),
        (30, 4, 1, "fewer", [7, 8, 8, 7]),
        (4, 6, 1, "own", [0, 1, 1, 1, 1, 0]),
        (4, 5, 1, "fewer", [0, 1, 2, 1, 0]),
        (8, 4, 1, "own", [0, 4, 4, 0]),
        (7, 5, 1, "own", [0, 2, 3, 2, 0]),
        (4, 1, 1, "fewer", [4]),
    ],
)
def test_ends_count_as_blocks_or_have_stages_of_their_own(
    num_layers: int, pp: int, virtual: int, ends: Ends, counts: list[int]
) -> None:
    stages = even_stages(gpt(num_layers), pp, virtual, "interleaved" if virtual > 1 else "1f1b", ends)
    assert layers(stages) == counts
    assert stages[0].blocks[0] == "embed"
    assert stages[-1].blocks[-2:] == ("norm", "head")


@pytest.mark.parametrize(
    ("pp", "ends", "said"),
    [
        (5, "even", "'hand' has 4 repeated blocks: set pp · virtual to 4 or less, set ends to own, or give the stages"),
        (7, "even", "set pp · virtual to 4 or less, or to 6 with ends own"),
        (7, "own", "4 repeated blocks beside its embedding and head: set pp · virtual to 6 or less"),
        (7, "fewer", "set pp · virtual to 6 or less"),
        (
            2,
            "own",
            "ends='own' needs 3 stages or more, .* but pp=2 with virtual=1 makes 2: raise pp or virtual, or set ends",
        ),
        (1, "own", "needs 3 stages or more"),
    ],
)
def test_more_stages_than_blocks_and_ends_are_refused(pp: int, ends: Ends, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        even_stages(msgspec.structs.replace(gpt(4), model="hand"), pp, 1, "1f1b", ends)


@pytest.mark.parametrize(
    ("names", "ends", "said"),
    [
        (
            ("0", "1", "2"),
            "own",
            "no block before its first (the embedding) and none after its last (the head) repeated one",
        ),
        (("0", "1", "2"), "fewer", "and none after its last"),
        (
            ("0", "1", "2", "head"),
            "own",
            "no block before its first (the embedding) repeated one: make them modules beside",
        ),
        (("embed", "0", "1"), "own", "no block after its last (the head) repeated one"),
        (("stem", "head"), "fewer", "has no repeated blocks"),
    ],
)
def test_a_model_without_ends_of_its_own_is_refused(names: tuple[str, ...], ends: Ends, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        even_stages(graph_of(*names), 3, 1, "1f1b", ends)


def test_an_end_that_is_there_counts_as_a_block() -> None:
    stages = even_stages(graph_of("0", "1", "2", "head"), 2, 1, "1f1b", "fewer")
    assert [len(expand_names(stage.blocks)) for stage in stages] == [2, 2]


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


def test_a_module_without_parts_is_one_stage() -> None:
    """nn.Linear alone: its only block is the whole, which has no name."""
    assert [stage.blocks for stage in even_stages(graph_of(), 1, 1, "1f1b")] == [()]
