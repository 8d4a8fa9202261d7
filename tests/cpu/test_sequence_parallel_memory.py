"""Sequence parallel: what a block keeps for backward is this rank's tokens, and nothing that was gathered for its weights."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cases import graph_of, source_of
from pool import RankPool, this_rank

from meshwright.core.request import PlanRequest
from meshwright.planner.shardings import with_legal_sharding
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply

Pools = Callable[[int], RankPool]
MODEL = "gpt:layers=6,hidden=32,heads=4,seq=16,vocab=61"
WHOLE_BYTES = 6 * 16 * 32 * 4
"""Of six sequences; a rank's tokens take half."""


def alive_on_rank(model: str) -> dict[str, int]:
    """Tensors with all tokens of a sequence that are in memory as the last block of a forward begins."""
    request = PlanRequest(tp=2, sequence_parallel=True, global_batch=6, microbatch=6, precision="fp32", compile=False)
    plan = with_legal_sharding(plain_plan(request, graph_of(model), 2, "tests"), model)
    program = apply(
        source_of(model).build(), plan, optimizer=partial(torch.optim.AdamW, lr=1e-3), device=this_rank().device
    )
    found: Counter[str] = Counter()
    before = alive()  # what earlier calls left in this rank; held, so that none of this step's takes its place

    def count(*_: Any) -> None:
        found["whole"] = len(alive().keys() - before.keys())

    program.module.get_submodule("blocks.5").register_forward_pre_hook(count)
    example = source_of(model).example
    assert example is not None
    program.step(example(6))
    return dict(found)


def alive() -> dict[int, torch.Tensor]:
    """Tensors of that many bytes, by where they lie."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return {one.data_ptr(): one for one in tensors if one.untyped_storage().nbytes() == WHOLE_BYTES}


def test_gathered_tokens_are_gone_when_their_block_is_done(pool: Pools) -> None:
    """With them kept, each of the five blocks before would hold two."""
    for found in pool(2).run(alive_on_rank, MODEL):
        assert found["whole"] <= 2, found
