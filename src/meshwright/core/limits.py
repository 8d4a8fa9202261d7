"""What the Plan value can say, and the cost model can cost, but this version cannot run yet."""

from __future__ import annotations

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan

CAN = "dp with ZeRO 0 to 3 and hybrid sharding, tp, sequence parallel, cp, ep, recompute, compile, every precision, schedule 1f1b"


def check_runs(plan: Plan) -> None:
    """A plan that cannot run yet is refused before any rank starts."""
    if reasons := not_yet(plan):
        raise PlanError(f"this version cannot run {', '.join(reasons)} yet: it runs {CAN}")


def not_yet(plan: Plan) -> list[str]:
    """The parts of a plan that are not built yet, in words."""
    axes = {axis: getattr(plan.mesh, axis) for axis in ("pp",)}
    parts = {
        **{f"{axis}={degree}": degree > 1 for axis, degree in axes.items()},
        "selective recompute of compiled blocks": bool(plan.recomputed("selective")) and plan.compile,
        f"offload of {plan.offload.what}": plan.offload.what != "none",
        f"schedule {plan.schedule}": plan.schedule != "1f1b",
    }
    return [words for words, asked in parts.items() if asked]
