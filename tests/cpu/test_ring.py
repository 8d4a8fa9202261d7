"""Ring attention: keys and values go round the cp ranks. The same as one process, with the collectives that cost/ predicts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pool import RankPool
from table import Row, fill, row

Pools = Callable[[int], RankPool]

CELLS = [
    ("gpt", row(2, cp=2, context="ring")),
    ("Llama", row(2, cp=2, context="ring")),
    ("BERT", row(2, cp=2, context="ring")),
    ("gpt", row(4, cp=4, context="ring")),
    ("Llama", row(4, tp=2, cp=2, context="ring")),
    ("gpt", row(4, tp=2, sequence_parallel=True, cp=2, context="ring")),
    ("GPT-2", row(4, cp=2, context="ring", pp=2)),
    ("gpt", row(4, cp=2, context="ring", zero=3)),
    ("T5", row(2, cp=2, context="ring")),
    ("Mixtral", row(2, cp=2, context="ring")),
    ("gpt", row(2, cp=2, context="ring", recompute="full")),
    ("Llama", row(2, cp=2, context="ring", recompute="selective")),
]


@pytest.mark.parametrize(("model", "plan"), CELLS, ids=str)
def test_agrees_with_one_process(pool: Pools, model: str, plan: Row) -> None:
    cell = fill(pool(plan.num_ranks), model, plan)
    assert not cell.refused
    assert cell.ok, cell.wrong
    assert cell.result is not None
    assert cell.result.max_loss_difference <= 1e-14
    assert cell.result.num_tensors > 0
