"""A search that asks the runtime about the sharding it chose, and searches again where that is not what runs.

What the runtime says is a value that the search takes (`core/legal.py`); only degrees that win are asked about.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from meshwright.core.errors import ModelError, PlanError
from meshwright.core.legal import LegalSharding
from meshwright.core.plan import BlockSharding, Plan
from meshwright.core.result import SearchResult

MOST_ANSWERS = 8
"""How often a search is told that a sharding it proposed is not what runs, before it is taken at its word."""

Settle = Callable[[Plan], Plan]
"""A plan → the same with shardings that run; refuses one that cannot."""


def search_legal(find: Callable[[tuple[LegalSharding, ...]], SearchResult], settle: Settle) -> SearchResult:
    legal: tuple[LegalSharding, ...] = ()
    for _ in range(MOST_ANSWERS):
        result = find(legal)
        answer = answer_about(result.plan, settle)
        if answer is None or (
            not answer.refusal and split_tensors(answer.sharding) == split_tensors(result.plan.sharding)
        ):
            break
        legal = (*legal, answer)
    return result


def answer_about(plan: Plan, settle: Settle) -> LegalSharding | None:
    """None where there is nothing to ask."""
    if plan.mesh.tp == 1 and plan.mesh.cp == 1:
        return None
    asked = LegalSharding(
        tp=plan.mesh.tp, cp=plan.mesh.cp, sequence_parallel=plan.sequence_parallel, context=plan.context
    )
    try:
        return msgspec.structs.replace(asked, sharding=settle(plan).sharding)
    except (PlanError, ModelError) as error:
        return msgspec.structs.replace(asked, refusal=str(error))


def split_tensors(sharding: tuple[BlockSharding, ...]) -> set[tuple[str, str, tuple[str, ...], int]]:
    """Which tensor of which blocks is cut how; tensors that stay whole are left out."""
    return {
        (",".join(rule.for_blocks) or str(rule.for_kind), tensor.tensor, tensor.dims, tensor.runs)
        for rule in sharding
        for tensor in rule.tensors
        if any(tensor.dims)
    }
