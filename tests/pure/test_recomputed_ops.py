"""The ops that a recompute runs again: all, the attention core, or all but attention and every second matmul."""

from __future__ import annotations

import msgspec
import pytest
from machines import named_machine, plan_for
from transformer import Sizes, transformer_graph

from meshwright.core.graph import Graph
from meshwright.core.plan import Offload, Plan
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.cost.compute.block_compute import ComputeCost
from meshwright.cost.compute.recomputed_ops import ActivationMode, recompute_modes, recomputed_ops
from meshwright.cost.local_block import make_local_blocks
from meshwright.cost.memory.footprint import Footprints

EAGER = transformer_graph(attention="eager", dropout=True, hidden=512, heads=8, seq=256)
FUSED = transformer_graph(hidden=512, heads=8, seq=256)
OPS = Recipe(system=TrainingSystem(selective="selective ops"))


def names(mode: ActivationMode, graph: Graph = FUSED) -> list[str]:
    kind = graph.kind_by_block["blocks.0"]
    return [kind.ops[number].name for number in sorted(recomputed_ops(kind, mode))]


def test_full_does_all_of_forward_again() -> None:
    kind = FUSED.kind_by_block["blocks.0"]
    assert len(recomputed_ops(kind, "full")) == sum(op.phase == "forward" for op in kind.ops)
    assert recomputed_ops(kind, "none") == frozenset()


def test_full_ends_with_what_backward_needs() -> None:
    """The MLP's second product, and the sum behind it, make what the next block keeps as its input."""

    kind, plan = FUSED.kind_by_block["blocks.0"], plan_for(FUSED, recompute="full")
    local_block = make_local_blocks(FUSED, plan)["blocks.0"]

    def seconds(plan: Plan, recipe: Recipe) -> float:
        return ComputeCost(FUSED, plan, named_machine(), recipe).recompute_work(local_block, "blocks.0", "full").kernel

    cost = ComputeCost(FUSED, plan, named_machine(), Recipe())
    last = [number for number, op in enumerate(kind.ops) if op.phase == "forward"][-2:]
    assert [kind.ops[number].kind for number in last] == ["matmul", "elementwise"]
    whole = seconds(plan, Recipe(system=TrainingSystem(whole_recompute=True)))
    assert whole - seconds(plan, Recipe()) == pytest.approx(
        sum(cost.op_seconds(local_block, number) for number in last)
    )
    streamed = msgspec.structs.replace(plan, offload=Offload(what="parameters"))
    assert seconds(streamed, Recipe()) == whole


def test_selective_does_again_what_rebuilds_the_attention_core() -> None:
    """The product with the values is read by the projection, and kept; a checkpoint around the core would redo it too."""
    assert names("selective", EAGER) == ["bmm", "_softmax", "native_dropout"]
    assert names("selective core", EAGER) == ["bmm", "_softmax", "native_dropout", "bmm"]
    assert names("selective", FUSED) == []


def test_selective_ops_keep_attention_and_every_second_matmul() -> None:
    """Query, value and the MLP's first of six are kept; key, the projection and the MLP's second are recomputed."""
    assert names("selective ops").count("addmm") == 3
    assert "_scaled_dot_product_flash_attention" not in names("selective ops")
    assert names("selective ops").count("native_layer_norm") == 2


def test_the_recipe_says_what_selective_means() -> None:
    plan = plan_for(FUSED, recompute="selective")
    assert set(recompute_modes(plan, Recipe()).values()) == {"selective"}
    assert set(recompute_modes(plan, OPS).values()) == {"selective ops"}
    core = Recipe(system=TrainingSystem(selective="selective core"))
    assert set(recompute_modes(plan, core).values()) == {"selective core"}
    assert set(recompute_modes(plan_for(FUSED, recompute="full"), OPS).values()) == {"full"}
    assert recompute_modes(plan_for(FUSED), OPS) == {}


@pytest.mark.parametrize("graph", [EAGER, FUSED])
def test_selective_ops_lie_between_none_and_full(graph: Graph) -> None:
    """In what is kept, and in the work that is done again."""
    kept, recomputed = [], []
    modes: tuple[ActivationMode, ...] = ("none", "selective ops", "full")
    for mode in modes:
        plan = plan_for(graph, recompute=mode.split()[0], microbatch=4)
        local_block = make_local_blocks(graph, plan)["blocks.0"]
        kept.append(Footprints(plan, OPS).of(local_block, "blocks.0", 0).kept)
        cost = ComputeCost(graph, plan, named_machine(), OPS)
        recomputed.append(cost.recompute_work(local_block, "blocks.0", mode).kernel)
    assert kept == sorted(kept, reverse=True)
    assert recomputed == sorted(recomputed)
    assert len(set(kept)) == len(set(recomputed)) == 3


def test_selective_ops_keep_what_they_do_not_redo() -> None:
    """s h items of 2 bytes: the block's result, query, value, attention's result; 4 s h of the MLP's first."""
    sizes = Sizes(hidden=512, heads=8, seq=256)
    plan = plan_for(FUSED, recompute="selective")
    found = Footprints(plan, OPS).of(make_local_blocks(FUSED, plan)["blocks.0"], "blocks.0", 0).kept
    assert found == pytest.approx(sizes.stream_bytes * (1 + 2 + 1 + 4))
