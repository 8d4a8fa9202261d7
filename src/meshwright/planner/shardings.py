"""Plans with shardings that were tried: what a plan says of tensors is what will run.

What was found for a named model is kept beside its graph. A graph says sizes, not how code takes a fused projection apart: whoever
captured a module in this process gets plans whose shardings were run on it, on fake tensors. The module is not kept alive, and one
that was spread since is not asked.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.core.codec import stable_hash
from meshwright.core.files.cache import keep, read_kept
from meshwright.core.graph import Graph, identity
from meshwright.core.plan import BlockSharding, Plan
from meshwright.planner.graphs import graph_file

if TYPE_CHECKING:
    from torch import nn

    from meshwright.models.objective import Batch, Objective

SHARDING_VERSION = 3
"""Raised when other shardings become legal: cached ones are then tried again."""
_CAPTURED: dict[str, tuple[weakref.ref[nn.Module], Batch, Objective]] = {}
"""Models that were captured in this process, by the identity of their graph."""


def with_legal_sharding(plan: Plan, model: str) -> Plan:
    """Proposed shardings tried on fake tensors; the legal ones are cached with the model's graph."""
    if plan.mesh.tp == 1 and plan.mesh.cp == 1:
        return plan
    path = _file(plan, model)
    if path is not None and (known := read_kept(path, tuple[BlockSharding, ...])) is not None:
        return msgspec.structs.replace(plan, sharding=known)
    from meshwright.measure.checking.small_plan import try_sharding
    from meshwright.models.seeded import only_looked_at
    from meshwright.models.source import resolve

    with only_looked_at():
        tried = try_sharding(plan, resolve(model))
    if path is not None:
        keep(path, tried.sharding)
    return tried


def _file(plan: Plan, model: str) -> Path | None:
    """None for a model whose graph is not kept either."""
    graph = graph_file(model, "fp32")
    if graph is None:
        return None
    rules = [repr(rule) for rule in plan.sharding]
    facts = [graph.name, plan.mesh.tp, plan.mesh.cp, plan.sequence_parallel, plan.context, rules, SHARDING_VERSION]
    return graph.parent.parent / "shardings" / f"{stable_hash(facts)}.json"


def remember(graph: Graph, model: nn.Module, batch: Batch, objective: Objective) -> Graph:
    """The module that a graph was captured from."""
    _CAPTURED[graph.identity] = weakref.ref(model), batch, objective
    return graph


def remembered(identity_of_graph: str) -> tuple[nn.Module, Batch, Objective] | None:
    """What a graph was captured from, where that was in this process, and the module still is as it was."""
    from meshwright.models.parameters import list_parameters

    if identity_of_graph not in _CAPTURED:
        return None
    reference, batch, objective = _CAPTURED[identity_of_graph]
    model = reference()
    if model is None or identity(list_parameters(model)) != identity_of_graph:
        return None
    return model, batch, objective


def settled(plan: Plan) -> Plan:
    """The plan with shardings that run, where its model was captured here."""
    found = remembered(plan.graph)
    if found is None:
        return plan
    from meshwright.runtime.split.legal import legal_plan

    model, batch, _ = found
    return legal_plan(plan, model, batch)
