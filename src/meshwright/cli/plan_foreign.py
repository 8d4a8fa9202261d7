"""`meshwright plan --from-deepspeed`, `--from-accelerate`: what a configuration costs, and what would be better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.cluster import Cluster
    from meshwright.core.estimate import Estimate
    from meshwright.core.plan import Plan
    from meshwright.core.request import PlanRequest
    from meshwright.core.result import SearchResult
    from meshwright.interop.foreign import Foreign
    from meshwright.planner.limits import Limits


def improve_on(
    console: Console,
    foreign: Foreign,
    model: str,
    cluster: str,
    flags: PlanRequest,
    limits: Limits,
    output: str | None,
    as_json: bool,
) -> None:
    """The configuration's plan with its cost, then the search with its batch and precision, and what to change."""
    from meshwright.cli.plan import answered, as_object
    from meshwright.cli.plan_file import save_plan
    from meshwright.jobs.output import print_json, say_on
    from meshwright.planner.foreign import ForeignQuestion
    from meshwright.planner.subject import NamedModel

    asked = ForeignQuestion.ask(foreign, NamedModel(model), cluster, flags, limits, say_on(console))
    found, graph = asked.better.cluster, asked.better.graph
    _show_theirs(console, foreign, asked.plan, asked.estimate, found)
    result = answered(asked.better, console, as_json)
    said = _show_better(console, asked.plan, asked.estimate, result, found)
    if output is not None:
        console.print(f"saved as {save_plan(result.plan, output)}", highlight=False)
    if as_json:
        read = {"plan": asked.plan, "estimate": asked.estimate, "without_effect": foreign.without_effect}
        configuration = {**read, "not_planned": foreign.not_planned}
        print_json({**as_object(result, found, graph), "configuration": configuration, **said})


def _show_theirs(console: Console, foreign: Foreign, plan: Plan, estimate: Estimate, cluster: Cluster) -> None:
    from meshwright.report.foreign import foreign_view

    console.print(foreign_view(foreign, plan, estimate, cluster))


def _show_better(
    console: Console, theirs: Plan, cost: Estimate, result: SearchResult, cluster: Cluster
) -> dict[str, Any]:
    """The search's plan beside theirs: what to change, and what it gains."""
    from meshwright.cli.plan_diff import compare_estimates
    from meshwright.report.differences import differences_table, plan_differences
    from meshwright.report.foreign import advice

    differences = plan_differences(theirs, result.plan)
    names = ("yours", "the search's")
    console.print(advice(cost, result.estimate, bool(differences)), highlight=False)
    if not differences:
        return {"differences": (), "estimates": [cost, result.estimate]}
    console.print(differences_table(differences, names))
    return {"differences": differences, **compare_estimates(console, cost, result.estimate, names)}
