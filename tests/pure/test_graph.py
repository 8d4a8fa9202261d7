"""Graphs: counts, affine quantities, and the identity a plan is made for."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import hand_graph, quick, values

from meshwright.core.graph import Affine, Graph, Parameter, identity
from meshwright.rules.groups import shard_groups

parameters = st.lists(values(Parameter), min_size=1, max_size=5, unique_by=lambda parameter: parameter.name).map(tuple)


def test_tied_parameters_count_once() -> None:
    graph = hand_graph()
    assert len(graph.parameters) == 6
    assert [parameter.name for parameter in graph.own_parameters if "blocks" not in parameter.name] == ["embed.weight"]
    assert graph.num_parameters == 50 * 8 + 4 * 8 * 8


def test_flops_add_up_over_blocks_and_counts() -> None:
    assert hand_graph().flops(num_samples=3) == (4 * 2 + 2 * 2) * (10 + 3 * 100)


def test_blocks_and_kinds() -> None:
    graph = hand_graph()
    assert graph.repeated_blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert [kind.name for kind in graph.kind_by_block.values()] == ["outside", "outside", *["Block"] * 4, "Head"]


def test_a_scalar_parameter_has_one_element() -> None:
    assert Parameter(name="scale", shape=(), dtype="float32").num_elements == 1
    assert Parameter(name="weight", shape=(3, 4, 5), dtype="float32").num_elements == 60


@quick
@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 1000))
def test_affine_passes_through_both_captures(fixed: int, per_sample: int, num_samples: int) -> None:
    line = Affine(fixed, per_sample)
    assert line.at(0) == fixed
    assert line.at(num_samples + 1) - line.at(num_samples) == per_sample


def test_affine_is_written_as_two_numbers() -> None:
    assert msgspec.to_builtins(hand_graph())["batch_bytes"] == [0.0, 64.0]


@quick
@given(parameters, st.randoms(use_true_random=False))
def test_identity_does_not_depend_on_order_or_dtype(chosen: tuple[Parameter, ...], random: st.randoms) -> None:
    other = [msgspec.structs.replace(parameter, dtype="float64", block="elsewhere") for parameter in chosen]
    random.shuffle(other)
    assert identity(tuple(other)) == identity(chosen)


@pytest.mark.parametrize(
    "change",
    [{"name": "embed.bias"}, {"shape": (8, 50)}, {"shape": (400,)}, {"trainable": False}, {"tied_to": "head.weight"}],
)
def test_identity_changes_with_what_is_trained(change: dict[str, object]) -> None:
    graph = hand_graph()
    changed = (msgspec.structs.replace(graph.parameters[0], **change), *graph.parameters[1:])
    assert identity(changed) != graph.identity


def test_identity_is_of_the_parameters_only() -> None:
    graph = hand_graph()
    other = msgspec.structs.replace(graph, model="renamed", tokens_per_sample=7, blocks=())
    assert other.identity == graph.identity
    assert other.hash != graph.hash


@quick
@given(values(Graph))
def test_identity_survives_the_file(graph: Graph) -> None:
    assert Graph.from_toml(graph.to_toml()).identity == graph.identity


def test_a_repeated_block_is_a_group_of_its_own() -> None:
    graph = hand_graph()
    groups = shard_groups(graph.parameters, [block.name for block in graph.blocks])
    named = {name: [parameter.name for parameter in group] for name, group in groups.items()}
    assert named == {"": ["embed.weight"], **{f"blocks.{i}": [f"blocks.{i}.weight"] for i in range(4)}}


def test_a_block_tied_to_another_joins_the_rest() -> None:
    graph = hand_graph()
    tied = msgspec.structs.replace(graph.parameters[2], tied_to="blocks.0.weight")
    groups = shard_groups((*graph.parameters[:2], tied, *graph.parameters[3:]), graph.repeated_blocks)
    assert [parameter.name for parameter in groups[""]] == ["embed.weight", "blocks.0.weight"]
    assert set(groups) == {"", "blocks.2", "blocks.3"}
