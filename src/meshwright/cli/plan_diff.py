"""`meshwright plan --diff A B`: what differs between two plan files, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.cluster import Cluster
    from meshwright.core.estimate import Estimate
    from meshwright.core.plan import Plan


def compare_files(
    console: Console,
    files: tuple[str, str],
    model: str | None,
    cluster: str | None,
    hosts: int | None,
    memory: str | None,
    as_json: bool,
) -> None:
    """Differences alone where no cluster is named; with one, both estimates side by side."""
    from meshwright.core.plan import Plan
    from meshwright.jobs.output import print_json, say_on
    from meshwright.planner.clusters import asked_cluster
    from meshwright.report.differences import differences_table, plan_differences

    plans = Plan.load(files[0]), Plan.load(files[1])
    differences = plan_differences(*plans)
    console.print(differences_table(differences, files) if differences else "the plans are the same")
    said: dict[str, Any] = {"differences": differences}
    if cluster is None:
        if differences:
            console.print("what it costs: add --cluster NAME_OR_FILE, and --hosts N", highlight=False)
    else:
        found = asked_cluster(cluster, hosts, say=say_on(console))
        estimates = [
            _estimate(plan, model or plan.model, found, file, memory) for plan, file in zip(plans, files, strict=True)
        ]
        said |= compare_estimates(console, estimates[0], estimates[1], files)
    if as_json:
        print_json(said)


def compare_estimates(console: Console, first: Estimate, second: Estimate, names: tuple[str, str]) -> dict[str, Any]:
    """Both side by side, and as JSON."""
    from meshwright.report.differences import changes_table, estimate_changes

    console.print(changes_table(first, second, names))
    return {"estimates": [first, second], "changes": estimate_changes(first, second)}


def _estimate(plan: Plan, model: str, cluster: Cluster, file: str, memory: str | None) -> Estimate:
    from meshwright.core.errors import InputError
    from meshwright.cost.estimate import estimate
    from meshwright.planner.clusters import budget_of
    from meshwright.planner.estimate import check_made_for
    from meshwright.planner.graphs import graph_of

    if not model:
        raise InputError(f"{file} does not say which model it is for: name the MODEL on the command line")
    graph = graph_of(model, plan.precision, plan.casting)
    check_made_for(plan, graph, file)
    return estimate(graph, plan, cluster, budget_bytes=budget_of(memory))
