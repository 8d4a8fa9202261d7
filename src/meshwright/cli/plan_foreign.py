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


def improve_on(
    console: Console,
    foreign: Foreign,
    model: str,
    cluster: str,
    hosts: int | None,
    nproc: int | None,
    flags: PlanRequest,
    settings: dict[str, Any],
    output: str | None,
    as_json: bool,
) -> None:
    """Cost the configuration's plan, search with its batch and precision, and say what to change."""
    import msgspec

    from meshwright.cli.output import print_json
    from meshwright.cli.plan_cluster import asked_cluster, check_budget
    from meshwright.cli.plan_file import save_plan
    from meshwright.cli.searching import prepare, say_infeasible
    from meshwright.cli.shardings import with_legal_sharding
    from meshwright.cli.wiring import plain_precision
    from meshwright.core.errors import InfeasibleError
    from meshwright.cost.estimate import estimate
    from meshwright.interop.foreign import filled, foreign_plan

    found = asked_cluster(console, cluster, foreign.num_hosts if hosts is None else hosts, nproc)
    check_budget(settings["memory"], found)
    precision = filled(foreign, flags).precision or plain_precision(found)
    _check_ranks(foreign, found)
    searching = prepare(model, precision, recipe=foreign.recipe, **settings)
    flags = msgspec.structs.replace(flags, precision=precision)
    theirs = with_legal_sharding(foreign_plan(foreign, flags, searching.graph, found.num_devices, found.hash), model)
    seen = searching.other_casting if searching.other_casting and theirs.casting == "parameters" else searching.graph
    cost = estimate(seen, theirs, found, foreign.recipe, searching.budget_bytes)
    _show_theirs(console, foreign, theirs, cost, found)
    try:
        result = searching.on(found, _kept(theirs, flags))
    except InfeasibleError as error:
        say_infeasible(error, console, found, as_json)
        raise
    said = _show_better(console, theirs, cost, result, found)
    if output is not None:
        console.print(f"saved as {save_plan(result.plan, output)}", highlight=False)
    if as_json:
        from meshwright.cli.plan import as_object

        read = {"plan": theirs, "estimate": cost, "without_effect": foreign.without_effect}
        print_json(
            {
                **as_object(result, found, searching.graph),
                "configuration": {**read, "not_planned": foreign.not_planned},
                **said,
            }
        )


def _kept(theirs: Plan, flags: PlanRequest) -> PlanRequest:
    """What the search must not change: the numbers that are computed. Flags told what the file leaves to the script."""
    from meshwright.core.request import PlanRequest

    return PlanRequest(
        global_batch=theirs.global_batch,
        precision=theirs.precision,
        compile=theirs.compile or None,
        sync_batch_norm=theirs.sync_batch_norm or None,
        offload=flags.offload,
    )


def _check_ranks(foreign: Foreign, cluster: Cluster) -> None:
    from meshwright.core.errors import InputError

    if foreign.num_ranks is not None and foreign.num_ranks > cluster.num_devices:
        raise InputError(
            f"{foreign.where} starts {foreign.num_ranks} processes, but '{cluster.name}' with {cluster.num_hosts} hosts has "
            f"{cluster.num_devices} devices: add --hosts"
        )


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
