"""What of a plan is compared in small: every axis in use reduced to 2, on at most four ranks, so that pairs take turns.

axes in use     tp, cp, pp, ep, and dp where ZeRO shards over it
two or fewer    one comparison with all of them; on one rank where there is none, for offload
more            one for every pair
"""

from __future__ import annotations

from itertools import combinations

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest

MODEL_AXES = ("tp", "cp", "pp", "ep")


def needs_check(plan: Plan) -> bool:
    """Whether the plan divides the model itself, or runs it in parts: replicas and ZeRO without offload run it as it is."""
    divides = any(getattr(plan.mesh, axis) > 1 for axis in MODEL_AXES)
    return divides or plan.offload.what != "none"


def reduced(plan: Plan) -> list[tuple[PlanRequest, int]]:
    """Requests, each with the number of ranks that run it."""
    axes = [axis for axis in MODEL_AXES if getattr(plan.mesh, axis) > 1]
    if plan.zero and plan.mesh.dp > 1 and "ep" not in axes:
        axes.append("dp")
    together = [tuple(axes)] if len(axes) <= 2 else list(combinations(axes, 2))
    return [_of_axes(plan, one) for one in together]


def _of_axes(plan: Plan, axes: tuple[str, ...]) -> tuple[PlanRequest, int]:
    shards = "dp" in axes or "ep" in axes
    has = {axis: axis in axes for axis in (*MODEL_AXES, "dp")}
    request = PlanRequest(
        tp=2 if has["tp"] else None,
        cp=2 if has["cp"] else None,
        pp=2 if has["pp"] else None,
        ep=2 if has["ep"] else None,
        zero=plan.zero if shards else None,
        sequence_parallel=plan.sequence_parallel or None if has["tp"] else None,
        context=plan.context if has["cp"] else None,
        schedule=plan.schedule if has["pp"] else None,
        virtual=plan.virtual if has["pp"] else None,
        recompute=_recompute(plan),
        offload=plan.offload.what if plan.offload.what != "none" else None,
        sync_batch_norm=plan.sync_batch_norm or None,
    )
    return request, 2 ** len({"dp" if axis == "ep" else axis for axis in axes})


def _recompute(plan: Plan) -> str | None:
    modes = {rule.mode for rule in plan.recompute}
    return "full" if "full" in modes else "selective" if modes else "none"
