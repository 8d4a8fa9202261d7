"""What cannot run yet is refused with what can, and what is named there does run."""

from __future__ import annotations

from typing import Any

import pytest
from machines import plan_for
from transformer import transformer_graph

from meshwright.core.errors import PlanError
from meshwright.rules.limits import check_runs, not_yet

GRAPH = transformer_graph(layers=8, hidden=64, heads=4, seq=32)


@pytest.mark.parametrize(
    ("asked", "instead", "words"),
    [
        ({"compile": True, "recompute": "selective"}, {"compile": True, "recompute": "full"}, "recompute them in full"),
        ({"compile": True, "tp": 2}, {"compile": True}, "set tp and cp to 1"),
        ({"compile": True, "cp": 2}, {"cp": 2}, "leave compile out"),
        (
            {"offload": "parameters", "precision": "fp32"},
            {"offload": "parameters", "precision": "fp32", "recompute": "full"},
            "set recompute to full",
        ),
        (
            {"offload": "parameters", "recompute": "full", "tp": 2},
            {"offload": "optimizer", "tp": 2},
            "set these axes to 1",
        ),
        ({"schedule": "gpipe"}, {"schedule": "gpipe", "pp": 2}, "raise pp"),
        (
            {"schedule": "zb", "pp": 2, "zero": 3, "dp": 2},
            {"schedule": "zb", "pp": 2, "zero": 2, "dp": 2},
            "use ZeRO 2",
        ),
        ({"schedule": "zbv", "pp": 2, "zero": 3}, {"schedule": "interleaved", "pp": 2, "zero": 3}, "interleaved"),
        ({"schedule": "zb", "pp": 2, "compile": True}, {"pp": 2, "compile": True}, "schedules .*gpipe"),
    ],
)
def test_what_is_refused_says_what_runs(asked: dict[str, Any], instead: dict[str, Any], words: str) -> None:
    sizes = {"microbatch": 1, "global_batch": 8}
    with pytest.raises(PlanError, match=rf"this version cannot yet run .*: .*{words}"):
        check_runs(plan_for(GRAPH, **sizes, **asked))
    assert not not_yet(plan_for(GRAPH, **sizes, **instead))


def test_several_parts_are_named_together() -> None:
    plan = plan_for(GRAPH, microbatch=1, global_batch=8, compile=True, tp=2, offload="parameters")
    with pytest.raises(
        PlanError, match=r"compile with tp or cp.*, nor offload of parameters with tp=2, nor .*: .*; set these"
    ):
        check_runs(plan)
