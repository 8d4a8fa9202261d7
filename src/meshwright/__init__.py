"""Meshwright: which parallelism, for my model, on my cluster?

    cluster = mw.probe()                     # or mw.Cluster.named("a100-80g-selene", hosts=8)
    graph   = mw.capture(model, batch)
    result  = mw.search(graph, cluster)
    program = mw.apply(model, result.plan, optimizer=..., loss=...)
    out     = program.step(batch)

Importing this package imports neither torch nor anything else heavy: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "meshwright.core.cluster",
    "Estimate": "meshwright.core.estimate",
    "Graph": "meshwright.core.graph",
    "InfeasibleError": "meshwright.core.errors",
    "MeshwrightError": "meshwright.core.errors",
    "Plan": "meshwright.core.plan",
    "PlanRequest": "meshwright.core.request",
    "Recipe": "meshwright.core.recipe",
    "Schedule": "meshwright.core.pipeline.schedule",
    "SearchResult": "meshwright.core.result",
    "Trace": "meshwright.core.run.trace",
    "apply": "meshwright._api",
    "capture": "meshwright._api",
    "clip_grad_norm_": "meshwright.runtime.own_loop.loop",
    "deferred": "meshwright.runtime.deferred",
    "estimate": "meshwright.cost.estimate",
    "plain_plan": "meshwright._api",
    "predicted_vs_measured": "meshwright.report.tables",
    "probe": "meshwright.measure.probe",
    "search": "meshwright._api",
    "wrap": "meshwright._api",
}

if TYPE_CHECKING:
    from meshwright._api import apply, capture, plain_plan, search, wrap
    from meshwright.core.cluster import Cluster
    from meshwright.core.errors import InfeasibleError, MeshwrightError
    from meshwright.core.estimate import Estimate
    from meshwright.core.graph import Graph
    from meshwright.core.pipeline.schedule import Schedule
    from meshwright.core.plan import Plan
    from meshwright.core.recipe import Recipe
    from meshwright.core.request import PlanRequest
    from meshwright.core.result import SearchResult
    from meshwright.core.run.trace import Trace
    from meshwright.cost.estimate import estimate
    from meshwright.measure.probe import probe
    from meshwright.report.tables import predicted_vs_measured
    from meshwright.runtime.deferred import deferred
    from meshwright.runtime.own_loop.loop import clip_grad_norm_

__all__ = [
    "Cluster",
    "Estimate",
    "Graph",
    "InfeasibleError",
    "MeshwrightError",
    "Plan",
    "PlanRequest",
    "Recipe",
    "Schedule",
    "SearchResult",
    "Trace",
    "__version__",
    "apply",
    "capture",
    "clip_grad_norm_",
    "deferred",
    "estimate",
    "plain_plan",
    "predicted_vs_measured",
    "probe",
    "search",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
