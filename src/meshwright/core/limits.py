"""What the Plan value can say, and the cost model can cost, but this version cannot run yet; and what runs in its place."""

from __future__ import annotations

from meshwright.core.errors import PlanError
from meshwright.core.plan import SPLIT_SCHEDULES, Plan


def check_runs(plan: Plan) -> None:
    """A plan that cannot run yet is refused before any rank starts."""
    if found := not_yet(plan):
        raise PlanError(
            f"this version cannot yet run {', nor '.join(found)}: {'; '.join(dict.fromkeys(found.values()))}"
        )


def not_yet(plan: Plan) -> dict[str, str]:
    """The parts of a plan that are not built yet, in words, each with what to do instead."""
    schedule, splits = plan.schedule, plan.schedule in SPLIT_SCHEDULES
    parts = [
        (
            "selective recompute of compiled blocks",
            "recompute them in full, or leave compile out",
            bool(plan.recomputed("selective")) and plan.compile,
        ),
        (
            "compile with tp or cp, whose exchanges the compiler cannot follow",
            "leave compile out, or set tp and cp to 1",
            plan.compile and (plan.mesh.tp > 1 or plan.mesh.cp > 1),
        ),
        (
            f"offload of {plan.offload.what}",
            "set offload to none, and shard with ZeRO or recompute to save memory",
            plan.offload.what != "none",
        ),
        (
            f"schedule {schedule} without pp",
            "raise pp, or leave the schedule out",
            schedule != "1f1b" and plan.mesh.pp == 1,
        ),
        (
            f"ZeRO 3 with schedule {schedule}, which makes gradients of weights after their parameters are given up",
            "use ZeRO 2, or schedule gpipe, 1f1b or interleaved",
            plan.zero == 3 and splits and plan.mesh.pp > 1,
        ),
        (
            f"compile with schedule {schedule}, which cuts backward in two",
            "leave compile out, or use schedule gpipe, 1f1b or interleaved",
            plan.compile and splits and plan.mesh.pp > 1,
        ),
    ]
    return {words: instead for words, instead, asked in parts if asked}
