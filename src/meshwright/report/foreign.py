"""What a configuration of another library comes to as a plan, and what a search would change."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.units import format_bytes, format_seconds
from meshwright.interop.foreign import Foreign
from meshwright.report.plan_view import chosen_view


def foreign_view(foreign: Foreign, plan: Plan, estimate: Estimate, cluster: Cluster) -> Group:
    """Their plan in words and figures; keys without effect on one line, what a plan does not do on a line each."""
    keys = [key.partition(":")[0] for key in foreign.without_effect]
    lines = [Text(f"not planned: {words}", style="yellow") for words in foreign.not_planned]
    if keys:
        lines.append(Text(f"without effect on a plan: {', '.join(keys)}", style="dim"))
    return Group(
        Text(f"{foreign.where}, as Meshwright would run it", style="bold"),
        chosen_view(plan, estimate, cluster),
        *lines,
        Text(),
    )


def advice(theirs: Estimate, best: Estimate, differs: bool) -> str:
    """One sentence: whether to change anything."""
    if not differs:
        return f"the search chooses the same plan: {format_seconds(best.step_seconds)} per step"
    if not theirs.fits:
        over = format_bytes(theirs.needed_bytes - theirs.budget_bytes)
        return f"this does not fit, by {over}; the search's plan does, at {format_seconds(best.step_seconds)} per step"
    change = f"{format_seconds(theirs.step_seconds)} → {format_seconds(best.step_seconds)} per step"
    if best.step_seconds < theirs.step_seconds:
        return f"the search would do better: {change} ({1 - best.step_seconds / theirs.step_seconds:.1%} less)"
    return f"the search found nothing faster: {change}; yours is as good as any it looked at"
