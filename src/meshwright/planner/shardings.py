"""Plans with shardings that were tried: what a plan says of tensors is what will run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.core.plan import Plan
    from meshwright.models.source import ModelSource

SHARDING_VERSION = 3
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
    from meshwright.models.seeded import only_looked_at
    from meshwright.models.source import resolve

    with only_looked_at():
        tried = try_sharding(plan, resolve(model))
    if path is not None:
        _keep(path, msgspec.json.encode(tried.sharding))
    return tried


def try_sharding(plan: Plan, source: ModelSource) -> Plan:
    """The plan with what was found legal for its degree of tp."""
    from meshwright.measure.checking.small_plan import tried

    return tried(plan, source)


def _file(plan: Plan, model: str) -> Path | None:
    """None for a model whose graph is not kept either."""
    from meshwright.core.codec import stable_hash
    from meshwright.planner.graphs import graph_file

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
