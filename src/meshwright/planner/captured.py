"""Models that were captured in this process: plans made of their graphs are tried on them.

A graph says sizes, not how code takes a fused projection apart. Whoever captured a module here gets plans whose shardings were run
on it, on fake tensors. The module is not kept alive, and one that was spread since is not asked.
"""

from __future__ import annotations

import weakref

from torch import nn

from meshwright.core.graph import Graph, identity
from meshwright.core.plan import Plan
from meshwright.models.objective import Batch
from meshwright.models.parameters import list_parameters
from meshwright.runtime.split.legal import legal_plan

_MODELS: dict[str, tuple[weakref.ref[nn.Module], Batch]] = {}
"""By the identity of their graph."""


def remember(graph: Graph, model: nn.Module, batch: Batch) -> Graph:
    _MODELS[graph.identity] = weakref.ref(model), batch
    return graph


def settled(plan: Plan) -> Plan:
    """The plan with shardings that run, where its model is known here."""
    reference, batch = _MODELS.get(plan.graph, (None, None))
    model = reference() if reference is not None else None
    if model is None or batch is None or identity(list_parameters(model)) != plan.graph:
        return plan
    return legal_plan(plan, model, batch)
