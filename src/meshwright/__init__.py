"""Meshwright: which parallelism, for my model, on my cluster?

    cluster = mw.probe()                                      # or mw.Cluster.named("a100-80g-selene", hosts=8), or a file
    result  = mw.plan(model, cluster, batch=batch)            # what `meshwright plan` answers, value for value
    program = mw.apply(model, result.plan, optimizer=..., loss=...)
    out     = program.step(batch)

Importing this package imports neither torch nor anything else heavy: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.core.version import VERSION

__version__ = VERSION

_HOMES = {
    "Cluster": "meshwright.core.cluster",
    "Estimate": "meshwright.core.estimate",
    "FaultSettings": "meshwright.training.settings",
    "Graph": "meshwright.core.graph",
    "Guard": "meshwright.training.guard",
    "InfeasibleError": "meshwright.core.errors",
    "MeshwrightError": "meshwright.core.errors",
    "ParityResult": "meshwright.measure.parity",
    "Plan": "meshwright.core.plan",
    "PlanRequest": "meshwright.core.request",
    "Program": "meshwright.runtime.program",
    "Recipe": "meshwright.core.recipe",
    "RunSummary": "meshwright.jobs.summary",
    "Schedule": "meshwright.core.pipeline.schedule",
    "SearchProgress": "meshwright.core.result",
    "SearchResult": "meshwright.core.result",
    "StepOutput": "meshwright.runtime.step",
    "Sweep": "meshwright.report.sweep",
    "Trace": "meshwright.core.run.trace",
    "TrainingSystem": "meshwright.core.recipe",
    "apply": "meshwright._api",
    "capture": "meshwright._api",
    "clip_grad_norm_": "meshwright.runtime.own_loop.loop",
    "deferred": "meshwright.runtime.deferred",
    "estimate": "meshwright.planner.estimate",
    "load": "meshwright.training.program_state",
    "parity": "meshwright.planner.parity",
    "plain_plan": "meshwright._api",
    "plan": "meshwright.planner.plan",
    "plan_differences": "meshwright.report.differences",
    "plan_in_words": "meshwright.report.plan_words",
    "predicted_vs_measured": "meshwright.report.tables",
    "probe": "meshwright.measure.probe",
    "save": "meshwright.training.program_state",
    "search": "meshwright._api",
    "sweep": "meshwright.planner.sweep",
    "train": "meshwright.jobs.train",
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
    from meshwright.core.recipe import Recipe, TrainingSystem
    from meshwright.core.request import PlanRequest
    from meshwright.core.result import SearchProgress, SearchResult
    from meshwright.core.run.trace import Trace
    from meshwright.jobs.summary import RunSummary
    from meshwright.jobs.train import train
    from meshwright.measure.parity import ParityResult
    from meshwright.measure.probe import probe
    from meshwright.planner.estimate import estimate
    from meshwright.planner.parity import parity
    from meshwright.planner.plan import plan
    from meshwright.planner.sweep import sweep
    from meshwright.report.differences import plan_differences
    from meshwright.report.plan_words import plan_in_words
    from meshwright.report.sweep import Sweep
    from meshwright.report.tables import predicted_vs_measured
    from meshwright.runtime.deferred import deferred
    from meshwright.runtime.own_loop.loop import clip_grad_norm_
    from meshwright.runtime.program import Program
    from meshwright.runtime.step import StepOutput
    from meshwright.training.guard import Guard
    from meshwright.training.program_state import load, save
    from meshwright.training.settings import FaultSettings

__all__ = [
    "Cluster",
    "Estimate",
    "FaultSettings",
    "Graph",
    "Guard",
    "InfeasibleError",
    "MeshwrightError",
    "ParityResult",
    "Plan",
    "PlanRequest",
    "Program",
    "Recipe",
    "RunSummary",
    "Schedule",
    "SearchProgress",
    "SearchResult",
    "StepOutput",
    "Sweep",
    "Trace",
    "TrainingSystem",
    "__version__",
    "apply",
    "capture",
    "clip_grad_norm_",
    "deferred",
    "estimate",
    "load",
    "parity",
    "plain_plan",
    "plan",
    "plan_differences",
    "plan_in_words",
    "predicted_vs_measured",
    "probe",
    "save",
    "search",
    "sweep",
    "train",
    "wrap",
]


if not TYPE_CHECKING:  # a type checker is to refuse a name that is not there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
