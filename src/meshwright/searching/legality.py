"""A search that asks the runtime whether the sharding it chose can run, and searches again where it cannot.

The answer of the runtime is a value that the next search takes (core/legal.py). Only the degrees of the best plan are asked about.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from meshwright.core.errors import ModelError, PlanError
from meshwright.core.legal import LegalSharding
from meshwright.core.plan import BlockSharding, Plan
from meshwright.core.result import SearchResult

MOST_ANSWERS = 8
"""How many answers a search gets. After these its last plan is taken as it is."""

Settle = Callable[[Plan], Plan]
"""A plan → the same plan with shardings that run; raises for a plan that cannot run."""


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
    """What the runtime says about the sharding of a plan; None where the plan has neither tp nor cp."""
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
    """Which tensors of which blocks are split, and how. Tensors that stay whole are left out."""
    return {
        (",".join(rule.for_blocks) or str(rule.for_kind), tensor.tensor, tensor.dims, tensor.runs)
        for rule in sharding
        for tensor in rule.tensors
        if any(tensor.dims)
    }
