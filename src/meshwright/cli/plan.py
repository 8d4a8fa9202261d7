"""`meshwright plan`: choose a plan."""

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
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    flags: PlanFlags,
    cluster: ClusterOption = "local",
    hosts: HostsOption = 1,
    nproc: NprocOption = None,
    memory: MemoryOption = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Save the plan, .json or .toml.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Search the best plan for a model on a cluster. A plan flag fixes that part; the rest is searched."""
    from meshwright.cli.graphs import both_castings
    from meshwright.cli.output import make_console, print_json
    from meshwright.cli.wiring import budget_of, find_cluster, plain_precision
    from meshwright.core.errors import InputError
    from meshwright.report.tables import candidates_table, estimate_table
    from meshwright.search.search import search

    if flags.file is not None:
        raise InputError(
            "--plan gives a whole plan, and this verb searches one: use `meshwright estimate` to cost a plan"
        )
    console = make_console(as_json)
    found = find_cluster(console, cluster, hosts, nproc)
    graph, other = both_castings(model, flags.request.precision or plain_precision(found))
    result = search(graph, found, flags.request, budget_bytes=budget_of(memory), other_casting=other)
    console.print(candidates_table(result))
    console.print(estimate_table(result.plan, result.estimate))
    if result.plan.world < found.num_devices:
        console.print(
            f"uses {result.plan.world} of {found.num_devices} devices: more would be slower, or do not divide the batch"
        )
    if output is not None:
        console.print(f"saved as {result.plan.save(output)}")
    if as_json:
        print_json(
            {
                "plan": result.plan,
                "estimate": result.estimate,
                "search_seconds": result.search_seconds,
                "runners_up": [
                    {"plan": other.plan, "step_seconds": other.step_seconds, "reason": other.reason}
                    for other in result.runners_up
                ],
            }
        )
