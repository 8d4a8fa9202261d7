"""What of a plan is compared in small: every axis in use reduced to 2, on at most four ranks, so that pairs take turns.

axes in use     tp, cp, pp, ep, and dp where ZeRO shards over it
two or fewer    one comparison with all of them; on one rank where there is none, for offload
more            one for every pair
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from meshwright.core.axes import AXES, MODEL_AXES, Axis
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest


def needs_check(plan: Plan) -> bool:
    """Whether the plan divides the model itself, or runs it in parts: replicas and ZeRO without offload run it as it is."""
    return plan.mesh.divides_model or plan.offload.what != "none"


def reduced(plan: Plan) -> list[tuple[PlanRequest, int]]:
    """Requests, each with the number of ranks that run it."""
    axes = [axis for axis in MODEL_AXES if axis in plan.mesh.used]
    if plan.zero and plan.mesh.dp > 1 and "ep" not in axes:
        axes.append("dp")
    together = [tuple(axes)] if len(axes) <= 2 else list(combinations(axes, 2))
    return [_of_axes(plan, one) for one in together]


def _of_axes(plan: Plan, axes: tuple[Axis, ...]) -> tuple[PlanRequest, int]:
    shards = "dp" in axes or "ep" in axes
    degrees: dict[str, Any] = {axis: 2 for axis in axes if axis in MODEL_AXES}
    request = PlanRequest(
        **degrees,
        zero=plan.zero if shards else None,
        sequence_parallel=plan.sequence_parallel or None if "tp" in axes else None,
        context=plan.context if "cp" in axes else None,
        schedule=plan.schedule if "pp" in axes else None,
        virtual=plan.virtual if "pp" in axes else None,
        recompute=_recompute(plan),
        offload=plan.offload.what if plan.offload.what != "none" else None,
        sync_batch_norm=plan.sync_batch_norm or None,
    )
    return request, 2 ** len({AXES[axis].inside or axis for axis in axes})


def _recompute(plan: Plan) -> str | None:
    modes = {rule.mode for rule in plan.recompute}
    return "full" if "full" in modes else "selective" if modes else "none"
