"""Short searches of a part of the space: good plans to begin with, and simpler plans that are as fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.core.axes import AXES, MODEL_AXES
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.cost.origin import error_band
from meshwright.rules.divisors import divisors
from meshwright.searching.joint.best_first import BestFirst
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.problem import Problem, narrowed
from meshwright.searching.space import worlds

FEW_OPENED = 2000
"""Nodes that a short search opens."""
FEW_WITHOUT_STAGES = 100
"""Nodes that the one without stages opens, which looks at fewer devices too."""
FEW_AGAIN = 2
"""Cuts that are costed for a degree of tp where none fitted for a smaller one."""
MOST_DIVED = 6
"""Cuts that are costed to begin with, without stages and for each degree of tp."""
MOST_SIMPLER, SIMPLER_OPENED = 5, 150
"""Cuts that are costed, and nodes that are opened, to find a simpler plan that is as fast, for every mechanism that is left out."""


def first_plans(problem: Problem, drafts: Drafts) -> list[tuple[Plan, Estimate]]:
    """Good plans, so that bounds have something to cut off: 1f1b on all devices without cp, tp inside a host; those without
    stages, of which a model that is too large for them has many slow ones; then all else on the best mesh of these."""
    costed: list[tuple[Plan, Estimate]] = []
    best: BestFirst | None = None
    world = worlds(problem)[:1]
    degrees = divisors(problem.cluster.devices_per_host)
    parts: list[dict[str, object]] = [
        {"cp": 1, "schedule": "1f1b", "tp": tp, **({"sequence_parallel": True} if tp > 1 else {})} for tp in degrees
    ]
    parts.append({"pp": 1})
    for fixed in parts:
        narrow = narrowed(problem, fixed)
        if narrow is None or not world:
            continue
        here = replace(narrow, world=world[0]) if "schedule" in fixed else narrow
        most_opened = FEW_OPENED if "schedule" in fixed else FEW_WITHOUT_STAGES
        most_costed = MOST_DIVED if best is None or best.fastest is not None else FEW_AGAIN
        best = BestFirst(
            here, drafts, known=costed, most_costed=most_costed, most_opened=most_opened, stage="first plans"
        )
        best.run()
        costed = best.costed
    if best is None or best.fastest is None:
        return costed
    mesh = best.fastest[0].mesh
    same = narrowed(problem, mesh.degrees)
    if same is None:
        return costed
    then = BestFirst(
        same, drafts, known=costed, most_costed=2 * MOST_DIVED, most_opened=FEW_OPENED, stage="the best mesh so far"
    )
    then.run()
    return then.costed


def simpler_plans(problem: Problem, found: BestFirst) -> list[tuple[Plan, Estimate]]:
    """Plans without one of the mechanisms of the fastest, as far as they are as fast within the estimate's error."""
    assert found.fastest is not None
    plan, mesh = found.fastest[0], found.fastest[0].mesh
    restrictions: list[tuple[bool, Mapping[str, object]]] = [
        (plan.world > 1, dict.fromkeys(AXES, 1)),
        *((axis in mesh.used, {str(axis): 1}) for axis in MODEL_AXES),
        (plan.zero > 0, {"zero": 0}),
        (plan.schedule != "1f1b", {"schedule": "1f1b"}),
        (plan.sequence_parallel, {"sequence_parallel": False}),
        (bool(plan.recompute), {"recompute": "none"}),
        (plan.offload.what != "none", {**mesh.degrees, "offload": "none"}),
        (plan.compile, {"compile": False}),
    ]
    costed = []
    limit = found.best_seconds * (1 + error_band(problem.cluster))
    for applies, fixed in restrictions:
        narrow = narrowed(problem, fixed) if applies else None
        if narrow is not None:
            part = BestFirst(
                narrow,
                found.drafts,
                limit_seconds=limit,
                most_costed=MOST_SIMPLER,
                most_opened=SIMPLER_OPENED,
                stage="simpler plans",
            )
            part.run()
            costed += part.costed
    return costed
