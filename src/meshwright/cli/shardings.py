"""Plans with shardings that were tried: what a plan says of tensors is what will run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.core.legal import LegalSharding
    from meshwright.core.plan import BlockSharding, Plan
    from meshwright.core.result import SearchResult
    from meshwright.models.source import ModelSource

SHARDING_VERSION = 2
"""Raised when other shardings become legal: those kept from before are then tried again."""


def with_legal_sharding(plan: Plan, model: str) -> Plan:
    """Proposed shardings tried on fake tensors; what was found is kept beside the model's graph."""
    import msgspec

    from meshwright.core.plan import BlockSharding

    if plan.mesh.tp == 1 and plan.mesh.cp == 1:
        return plan
    path = _file(plan, model)
    if path is not None and path.exists():
        try:
            sharding = msgspec.json.decode(path.read_bytes(), type=tuple[BlockSharding, ...])
            return msgspec.structs.replace(plan, sharding=sharding)
        except (OSError, msgspec.DecodeError):
            pass  # cut short, or of another version: tried again
    from meshwright.models.source import resolve

    tried = try_sharding(plan, resolve(model))
    if path is not None:
        _keep(path, msgspec.json.encode(tried.sharding))
    return tried


MOST_ANSWERS = 8
"""How often a search is told that a sharding it proposed is not what runs, before it is taken at its word."""


def search_legal(find: Callable[[tuple[LegalSharding, ...]], SearchResult], model: str) -> SearchResult:
    """Search, ask the runtime about the sharding that was chosen, and search again where it says otherwise.

    What the runtime says is a value that the search takes; only degrees that win are asked about.
    """
    legal: tuple[LegalSharding, ...] = ()
    for _ in range(MOST_ANSWERS):
        result = find(legal)
        answer = answer_about(result.plan, model)
        if answer is None or (
            not answer.refusal and split_tensors(answer.sharding) == split_tensors(result.plan.sharding)
        ):
            break
        legal = (*legal, answer)
    return result


def answer_about(plan: Plan, model: str) -> LegalSharding | None:
    """None where there is nothing to ask."""
    from msgspec.structs import replace

    from meshwright.core.errors import ModelError, PlanError
    from meshwright.core.legal import LegalSharding

    if plan.mesh.tp == 1 and plan.mesh.cp == 1:
        return None
    asked = LegalSharding(
        tp=plan.mesh.tp, cp=plan.mesh.cp, sequence_parallel=plan.sequence_parallel, context=plan.context
    )
    try:
        return replace(asked, sharding=with_legal_sharding(plan, model).sharding)
    except (PlanError, ModelError) as error:
        return replace(asked, refusal=str(error))


def split_tensors(sharding: tuple[BlockSharding, ...]) -> set[tuple[str, str, tuple[str, ...], int]]:
    """Which tensor of which blocks is cut how; tensors that stay whole are left out."""
    return {
        (",".join(rule.for_blocks) or str(rule.for_kind), tensor.tensor, tensor.dims, tensor.runs)
        for rule in sharding
        for tensor in rule.tensors
        if any(tensor.dims)
    }


def try_sharding(plan: Plan, source: ModelSource) -> Plan:
    """The plan with what was found legal for its degree of tp."""
    from meshwright.models.faked.build import build_followable
    from meshwright.runtime.split.legal import legal_plan

    if (plan.mesh.tp == 1 and plan.mesh.cp == 1) or source.example is None:
        return plan
    return legal_plan(plan, build_followable(source.build), source.example(2))


def _file(plan: Plan, model: str) -> Path | None:
    """None for a model whose graph is not kept either."""
    from meshwright.cli.graphs import graph_file
    from meshwright.core.codec import stable_hash

    graph = graph_file(model, "fp32")
    if graph is None:
        return None
    rules = [repr(rule) for rule in plan.sharding]
    facts = [graph.name, plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context, rules, SHARDING_VERSION]
    return graph.parent.parent / "shardings" / f"{stable_hash(facts)}.json"


def _keep(path: Path, content: bytes) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        return  # a cache that cannot be written is not worth failing for
