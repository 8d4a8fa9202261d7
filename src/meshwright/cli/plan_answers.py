"""The answers of `meshwright plan`: a searched plan, two plan files side by side, or a better plan than another library's
configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, InputError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.result import SearchResult
from meshwright.cost.estimate import estimate
from meshwright.jobs.output import print_json, writing
from meshwright.planner.clusters import asked_cluster, checked_budget
from meshwright.planner.estimate import check_made_for
from meshwright.planner.foreign import ForeignQuestion
from meshwright.planner.graphs import graph_of
from meshwright.planner.plan import PlanQuestion
from meshwright.report.differences import changes_table, differences_table, estimate_changes, plan_differences
from meshwright.report.foreign import advice, foreign_view
from meshwright.report.infeasible import infeasible_view
from meshwright.report.plan_view import plan_view
from meshwright.report.plan_words import plan_in_words

SUFFIXES = (".json", ".toml")


def check_plan_file(file: str) -> None:
    """Before anything is searched for it."""
    if Path(file).suffix not in SUFFIXES:
        raise InputError(f"-o {file}: a plan is saved as {' or '.join(SUFFIXES)}")
    if Path(file).is_dir():
        raise InputError(f"-o {file}: is a folder: name a file in it")


def answer(asked: PlanQuestion, console: Console, as_json: bool) -> SearchResult:
    """Searches. Where nothing fits, shows the nearest miss and the ways out, and raises the error."""
    try:
        if as_json:  # nothing but the answer, on a terminal too
            return asked.answer()
        with console.status("searching …") as status:
            return asked.answer(lambda progress: status.update(progress.words))
    except InfeasibleError as error:
        if (found := error.found) is not None:
            console.print(infeasible_view(found, asked.cluster))
            if as_json:
                miss = {"plan": found.plan, "estimate": found.estimate, "binding": found.binding}
                counted = {"ways_out": found.ways_out, "num_candidates": found.num_candidates}
                print_json({"fits": False, "nearest_miss": miss, **counted})
        raise


def show(console: Console, result: SearchResult, asked: PlanQuestion, output: str | None, as_json: bool) -> None:
    """The searched plan on one screen, and as a file."""
    console.print(plan_view(result, asked.cluster, asked.graph))
    save(console, result.plan, output)
    if as_json:
        print_json(as_object(result, asked))


def save(console: Console, plan: Plan, output: str | None) -> None:
    if output is not None:
        with writing(output):
            console.print(f"saved as {plan.save(output)}")


def as_object(result: SearchResult, asked: PlanQuestion) -> dict[str, Any]:
    """A search as one JSON object."""
    found = msgspec.structs.asdict(result)
    del found["format"]  # of files of results
    words = plan_in_words(result.plan, asked.cluster, asked.graph)
    return {**found, "words": words, "gap": result.gap, "complete": result.complete}


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
    plans = Plan.load(files[0]), Plan.load(files[1])
    differences = plan_differences(*plans)
    console.print(differences_table(differences, files) if differences else "the plans are the same")
    said: dict[str, Any] = {"differences": differences}
    if cluster is not None:
        found = asked_cluster(cluster, hosts, say=console.print)
        first, second = (
            _estimate(plan, model or plan.model, found, file, memory) for plan, file in zip(plans, files, strict=True)
        )
        said |= _compare_estimates(console, first, second, files)
    elif differences:
        console.print("what it costs: add --cluster NAME_OR_FILE, and --hosts N")
    if as_json:
        print_json(said)


def _estimate(plan: Plan, model: str, cluster: Cluster, file: str, memory: str | None) -> Estimate:
    if not model:
        raise InputError(f"{file} does not say which model it is for: name the MODEL on the command line")
    graph = graph_of(model, plan.precision, plan.casting)
    check_made_for(plan, graph, file)
    return estimate(graph, plan, cluster, budget_bytes=checked_budget(memory, cluster))


def _compare_estimates(console: Console, first: Estimate, second: Estimate, names: tuple[str, str]) -> dict[str, Any]:
    """Both side by side, and as JSON."""
    console.print(changes_table(first, second, names))
    return {"estimates": [first, second], "changes": estimate_changes(first, second)}


def improve_on(console: Console, asked: ForeignQuestion, output: str | None, as_json: bool) -> None:
    """The configuration's plan with its cost, then the search with its batch and precision, and what to change."""
    foreign, theirs, cost = asked.foreign, asked.plan, asked.estimate
    console.print(foreign_view(foreign, theirs, cost, asked.better.cluster))
    result = answer(asked.better, console, as_json)
    differences = plan_differences(theirs, result.plan)
    console.print(advice(cost, result.estimate, bool(differences)))
    said: dict[str, Any] = {"differences": differences, "estimates": [cost, result.estimate]}
    if differences:
        names = ("yours", "the search's")
        console.print(differences_table(differences, names))
        said |= _compare_estimates(console, cost, result.estimate, names)
    save(console, result.plan, output)
    if as_json:
        read = {"plan": theirs, "estimate": cost, "without_effect": foreign.without_effect}
        configuration = {**read, "not_planned": foreign.not_planned}
        print_json({**as_object(result, asked.better), "configuration": configuration, **said})
