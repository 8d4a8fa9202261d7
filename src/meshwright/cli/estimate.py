"""`meshwright estimate`: what a plan would cost."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import (
    ClusterOption,
    HostsOption,
    JsonFlag,
    MemoryOption,
    NprocOption,
    PlanFlags,
    plan_flags,
)


@plan_flags
def estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    flags: PlanFlags,
    cluster: ClusterOption = "local",
    hosts: HostsOption = None,
    nproc: NprocOption = None,
    memory: MemoryOption = None,
    devices: Annotated[
        int | None, typer.Option("--devices", help="Devices the plan uses, where not all of the cluster's.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show every figure the estimate rests on, with its origin.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Predict step time and memory of a plan, given as a file or by plan flags, without running it."""
    import msgspec

    from meshwright.cli.graphs import graph_of
    from meshwright.cli.output import make_console, print_json
    from meshwright.cli.plan_cluster import asked_cluster
    from meshwright.cli.wiring import budget_of, casting_of_flags, plan_from_flags, precision_of
    from meshwright.cost.estimate import check_memory_of_all
    from meshwright.cost.estimate import estimate as estimate_plan
    from meshwright.report.explain import explain_table, figures
    from meshwright.report.tables import estimate_table

    console = make_console(as_json)
    found = asked_cluster(console, cluster, hosts, nproc)
    precision = precision_of(flags, found)
    graph = graph_of(model, precision, casting_of_flags(flags, precision, devices or found.num_devices))
    plan = plan_from_flags(flags, graph, found, devices)
    check_memory_of_all(graph, plan, found)
    result = estimate_plan(graph, plan, found, budget_bytes=budget_of(memory))
    console.print(estimate_table(plan, result))
    if explain:
        console.print(explain_table(found))
    if as_json:
        figures_found = {"figures": msgspec.to_builtins(figures(found))} if explain else {}
        print_json({**msgspec.to_builtins(result), **figures_found})
