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
    hosts: HostsOption = 1,
    nproc: NprocOption = None,
    memory: MemoryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict step time and memory of a plan, given as a file or by plan flags, without running it."""
    from meshwright.capture.capture import capture_source
    from meshwright.cli.output import make_console, print_json
    from meshwright.cli.wiring import budget_of, find_cluster, plan_from_flags, precision_of
    from meshwright.cost.estimate import estimate as estimate_plan
    from meshwright.models.source import resolve
    from meshwright.report.tables import estimate_table

    console = make_console(as_json)
    found = find_cluster(console, cluster, hosts, nproc)
    graph = capture_source(resolve(model), precision_of(flags))
    plan = plan_from_flags(flags, graph, found)
    result = estimate_plan(graph, plan, found, budget_bytes=budget_of(memory))
    console.print(estimate_table(plan, result))
    if as_json:
        print_json(result)
