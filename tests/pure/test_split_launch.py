"""Ops of a split model, and of one whose backward runs in halves, cost the host more where that was measured; no others do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machines import machine, plan_for
from transformer import transformer_graph

from meshwright.cost.estimate import estimate

GRAPH = transformer_graph(layers=2, hidden=64, heads=4, seq=32)


def forward_seconds(split_launch: float | None, halves_launch: float | None = None, **layout: Any) -> float:
    cluster = machine(4, kind="cpu", launch_seconds=1e-3)
    device = msgspec.structs.replace(
        cluster.device, split_launch_seconds=split_launch, halves_launch_seconds=halves_launch
    )
    return estimate(
        GRAPH, plan_for(GRAPH, **layout), msgspec.structs.replace(cluster, device=device)
    ).time_seconds.forward


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_a_split_model_pays_for_its_rules(layout: dict[str, Any]) -> None:
    as_elsewhere, measured = forward_seconds(None, **layout), forward_seconds(3e-3, **layout)
    kinds = GRAPH.kind_by_block
    ops = sum(op.count for block in GRAPH.blocks for op in kinds[block.name].ops if op.phase == "forward")
    assert measured - as_elsewhere == pytest.approx(ops * 2e-3)


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "global_batch": 2}, {"pp": 2, "global_batch": 2}])
def test_others_do_not(layout: dict[str, Any]) -> None:
    assert forward_seconds(3e-3, **layout) == pytest.approx(forward_seconds(None, **layout))


def test_backward_in_halves_is_paid_for_beside_the_rules() -> None:
    staged = {"pp": 2, "global_batch": 2, "schedule": "zb"}
    plain = forward_seconds(None, **staged)
    halves = forward_seconds(None, 2e-3, **staged)
    both = forward_seconds(3e-3, 2e-3, tp=2, **staged)
    assert halves > plain
    assert both - forward_seconds(None, tp=2, **staged) == pytest.approx(3 * (halves - plain))
    assert forward_seconds(None, 2e-3, pp=2, global_batch=2) == pytest.approx(
        forward_seconds(None, pp=2, global_batch=2)
    )
