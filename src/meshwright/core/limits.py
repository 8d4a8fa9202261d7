"""What the Plan value can say, and the cost model can cost, but this version cannot run yet."""

from __future__ import annotations

from meshwright.core.errors import PlanError
from meshwright.core.plan import SPLIT_SCHEDULES, Plan

CAN = (
    "dp with ZeRO 0 to 3 and hybrid sharding, tp, sequence parallel, cp, ep, pp with every schedule, recompute, compile, every "
    "precision"
)


def check_runs(plan: Plan) -> None:
    """A plan that cannot run yet is refused before any rank starts."""
    if reasons := not_yet(plan):
        raise PlanError(f"this version cannot run {', '.join(reasons)} yet: it runs {CAN}")


def not_yet(plan: Plan) -> list[str]:
    """The parts of a plan that are not built yet, in words."""
    parts = {
        "selective recompute of compiled blocks": bool(plan.recomputed("selective")) and plan.compile,
        "compile with tp or cp, whose rules the compiler does not see": (
            plan.compile and (plan.mesh.tp > 1 or plan.mesh.cp > 1)
        ),
        f"offload of {plan.offload.what}": plan.offload.what != "none",
        f"schedule {plan.schedule} without pp": plan.schedule != "1f1b" and plan.mesh.pp == 1,
        f"ZeRO 3 with schedule {plan.schedule}, which makes gradients of weights after their parameters are given up": (
            plan.zero == 3 and plan.schedule in SPLIT_SCHEDULES and plan.mesh.pp > 1
        ),
        f"compile with schedule {plan.schedule}": plan.compile and plan.schedule in SPLIT_SCHEDULES,
    }
    return [words for words, asked in parts.items() if asked]
