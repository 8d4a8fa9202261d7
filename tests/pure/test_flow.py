"""Which stage an event is on, and what is said of a cut that cannot be."""

from __future__ import annotations

import pytest

from meshwright.core.errors import PlanError
from meshwright.core.flow import OBJECTIVE, Flow, FlowEvent, FlowTensor
from meshwright.rules.stages import crossings, stages_of_events


def flow_of(*calls: str) -> Flow:
    """Blocks called one on what the other made, then the objective."""
    events = [FlowEvent(name, (n - 1,) if n else (), (n,)) for n, name in enumerate(calls)]
    return Flow(tensors=(FlowTensor(),) * len(calls), events=(*events, FlowEvent(OBJECTIVE, (len(calls) - 1,), ())))


def test_blocks_in_order_hand_on_one_tensor_a_cut() -> None:
    flow = flow_of("a", "b", "c")
    stages = stages_of_events(flow, {"a": 0, "b": 1, "c": 2}, 3)
    assert stages == (0, 1, 2, 2)
    assert crossings(flow, stages, 3) == ((0,), (1,))


def test_a_block_may_be_called_twice_on_its_stage() -> None:
    assert stages_of_events(flow_of("a", "b", "a", "c"), {"a": 0, "b": 0, "c": 1}, 2) == (0, 0, 0, 1, 1)


def test_a_block_on_too_early_a_stage_is_told_where_it_can_be() -> None:
    said = "cannot be cut at block 'b': it is on stage 0, but reads what stage 1 makes; put it on stage 1 or later"
    with pytest.raises(PlanError, match=said):
        stages_of_events(flow_of("a", "b"), {"a": 1, "b": 0}, 2)


def test_a_block_called_again_behind_another_stage_is_told_that_it_is_called_twice() -> None:
    said = (
        "cannot be cut between two calls of block 'a': it is on stage 0, and is called again on what stage 1 makes; put it and "
        "all blocks between its calls on one stage, or set pp to 1"
    )
    with pytest.raises(PlanError, match=said):
        stages_of_events(flow_of("a", "b", "a"), {"a": 0, "b": 1}, 2)
