"""Experts over ep: what a rank keeps of them, what ZeRO still shards, and the tokens that travel."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machines import DEVICE, chain_graph, machine, plan_for
from writer import Writer, shape_of

from meshwright.core.errors import PlanError
from meshwright.core.graph import Affine, Block, Graph, Kind, Parameter, Segment
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.block_calls import block_calls
from meshwright.cost.communication.links import Group
from meshwright.cost.communication.step_calls import step_calls
from meshwright.cost.estimate import Estimator, estimate
from meshwright.cost.local_block import make_local_blocks
from meshwright.cost.memory.local_parameters import local_parameters
from meshwright.cost.memory.rank_state import RankState

EXPERTS, TOKENS, HIDDEN, WIDE = 32, 64, 32, 64
DISPATCHED = TOKENS * HIDDEN * 4
"""Bytes of the tokens that enter the experts, one sample."""
COUNTED = 8 * EXPERTS
"""Bytes that say how many rows come to each expert."""
DENSE, SPARSE = HIDDEN * HIDDEN, 2 * EXPERTS * HIDDEN * WIDE


def expert_kind() -> Kind:
    """A dense matrix, tokens laid by expert, two matrices an expert, tokens laid back."""
    writer = Writer("Block", "fp32")
    laid = shape_of(EXPERTS, ("n", TOKENS // EXPERTS), HIDDEN)
    wide = shape_of(EXPERTS, ("n", TOKENS // EXPERTS), WIDE)
    x = writer.outside("@input", shape_of(("n", TOKENS), HIDDEN), freed=False)
    dense = writer.op(
        "forward", "mm", "matmul", [x, ("dense", shape_of(HIDDEN, HIDDEN))], x.shape, flops=Affine(0, 1e6)
    )
    sorted_ = writer.op("forward", "index", "copy", [dense], laid)
    up = [sorted_, ("up", shape_of(EXPERTS, HIDDEN, WIDE))]
    first = writer.op(
        "forward", "bmm", "matmul", up, wide, input_shapes=[laid, up[1][1]], flops=Affine(0, 1e6), region="expert"
    )
    bent = writer.op("forward", "gelu", "transcendental", [first], wide, region="expert")
    down = [bent, ("down", shape_of(EXPERTS, WIDE, HIDDEN))]
    second = writer.op(
        "forward", "bmm", "matmul", down, laid, input_shapes=[wide, down[1][1]], flops=Affine(0, 1e6), region="expert"
    )
    back = writer.op("forward", "index", "copy", [second], x.shape)
    writer.hand_on(back, saved=True)
    return writer.kind(("forward", 6), ("backward", 0))


def expert_graph(layers: int = 2) -> Graph:
    names = [f"blocks.{number}" for number in range(layers)]
    shapes = {"dense": (HIDDEN, HIDDEN), "up": (EXPERTS, HIDDEN, WIDE), "down": (EXPERTS, WIDE, HIDDEN)}
    kind = expert_kind()
    return msgspec.structs.replace(
        chain_graph(layers),
        parameters=tuple(
            Parameter(name=f"{b}.{n}", shape=shape, dtype="float32", block=b, expert=n != "dense")
            for b in names
            for n, shape in shapes.items()
        ),
        kinds=(Kind(name="Chain", ops=()), kind),
        blocks=(
            Block(name="", kind="Chain", repeated=False),
            *(Block(name=b, kind="Block", repeated=True) for b in names),
        ),
        timeline=(*(Segment(name, 0) for name in names), *(Segment(name, 1) for name in reversed(names))),
        tokens_per_sample=TOKENS,
    )


GRAPH = expert_graph()


def test_a_rank_keeps_its_share_of_the_experts() -> None:
    here = local_parameters(GRAPH, plan_for(GRAPH, dp=4, ep=4, global_batch=4), 0)
    assert sum(p.num_elements for p in here) == 2 * (DENSE + SPARSE // 4)


@pytest.mark.parametrize(("ep", "sharing"), [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("zero", [1, 3])
def test_zero_shards_experts_over_the_ranks_that_hold_the_same_ones(ep: int, sharing: int, zero: int) -> None:
    """dp = 8: whatever ep, each rank ends up with an eighth of all experts' state."""
    plan = plan_for(GRAPH, dp=8, ep=ep, zero=zero, global_batch=8)
    rank_state = RankState(GRAPH, plan, Recipe(optimizer_scalar_bytes=0), 0)
    assert rank_state.trainable == 2 * (DENSE // 8 + SPARSE // ep // sharing)
    assert rank_state.base.optimizer_state == 8 * rank_state.trainable
    assert rank_state.during_update(DEVICE).gradients == 4 * rank_state.trainable
    updated = Estimator(GRAPH, plan, machine(8), Recipe()).update_seconds(0)
    assert updated == pytest.approx(28 * rank_state.trainable / 1e9)


def test_gradients_of_experts_are_reduced_over_the_ranks_that_hold_the_same_ones() -> None:
    plan = plan_for(GRAPH, dp=8, ep=4, global_batch=8)
    found = [call for call in step_calls(GRAPH, plan, Recipe(), 0) if call.phase == "backward"]
    assert [(call.group, call.num_bytes) for call in found] == [
        (Group(8, 1), 4 * 2 * DENSE),
        (Group(2, 4), 4 * 2 * SPARSE // 4),
    ]
    alone = step_calls(GRAPH, plan_for(GRAPH, dp=4, ep=4, global_batch=4), Recipe(), 0)
    assert [call.num_bytes for call in alone if call.phase == "backward"] == [4 * 2 * DENSE]


@pytest.mark.parametrize("microbatch", [1, 3])
def test_tokens_travel_to_their_experts_and_back(microbatch: int) -> None:
    plan = plan_for(GRAPH, dp=4, ep=4, microbatch=microbatch)
    local_block = make_local_blocks(GRAPH, plan)["blocks.0"]
    *told, there = block_calls(local_block, plan, "forward")
    (back,) = block_calls(local_block, plan, "backward")
    for call in (there, back):
        assert (call.kind, call.axis, call.count, call.num_bytes) == ("all_to_all", "ep", 2, microbatch * DISPATCHED)
        assert call.group == Group(4, 1)
    assert [(call.kind, call.axis, call.count, call.num_bytes) for call in told] == [("all_to_all", "ep", 1, COUNTED)]


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="32 experts do not divide over ep=6: with dp=12 use 1, 2, 4"):
        make_local_blocks(GRAPH, plan_for(GRAPH, dp=12, ep=6, global_batch=12))


def test_experts_on_every_rank_send_nothing() -> None:
    plan = plan_for(GRAPH, dp=4, global_batch=4)
    assert block_calls(make_local_blocks(GRAPH, plan)["blocks.0"], plan, "forward") == ()


def gathered_once(**request: Any) -> float:
    slow = machine(8, bytes_per_second=1e3, latency_seconds=1e-12)
    plan = plan_for(GRAPH, **request, global_batch=8)
    return sum(stage.gather_once for stage in Estimator(GRAPH, plan, slow, Recipe()).stages)


def test_dense_and_expert_gathers_of_a_block_both_count() -> None:
    """Bytes that arrive: 7/8 of the dense weights, and of a rank's experts the half the other rank has. The second
    block's gather hides behind the tokens that travel in the first."""
    travelling = 3 / 4 * (2 * DISPATCHED + COUNTED) / 1e3
    expected = 2 * 4 * (7 / 8 * DENSE + 1 / 2 * SPARSE / 4) / 1e3 - travelling
    assert gathered_once(dp=8, ep=4, zero=1) == pytest.approx(expected, rel=0.01)


def test_experts_of_a_step_are_counted() -> None:
    found = estimate(GRAPH, plan_for(GRAPH, dp=4, ep=4, microbatch=1, global_batch=8), machine(4))
    rows = {(row.kind, row.axis): (row.count, row.total_bytes) for row in found.collectives}
    microbatches, layers = 2, 2
    assert rows["all_to_all", "ep"] == (microbatches * layers * 5, microbatches * layers * (4 * DISPATCHED + COUNTED))
    assert found.time_seconds.exposed_inner > 0
