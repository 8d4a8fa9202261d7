"""`meshwright estimate`: what a plan would cost."""

from __future__ import annotations

from typing import Annotated

import msgspec
from typer import Argument, Option

from meshwright.cli import options
from meshwright.jobs.output import make_console, print_json
from meshwright.planner.clusters import asked_cluster
from meshwright.planner.estimate import EstimateQuestion
from meshwright.planner.plan import Limits
from meshwright.planner.subject import NamedModel
from meshwright.report.explain import explain_table, figures
from meshwright.report.tables import estimate_table


@options.plan_flags
def estimate(
    model: Annotated[str, Argument(metavar="MODEL")],
    flags: options.PlanFlags,
    cluster: options.ClusterOption = "local",
    hosts: options.HostsOption = None,
    nproc: options.NprocOption = None,
    memory: options.MemoryOption = None,
    devices: Annotated[int | None, Option(help="Devices the plan uses, where not all of the cluster's.")] = None,
    explain: Annotated[
        bool, Option("--explain", help="Also show every figure the estimate rests on, with its origin.")
    ] = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Predict step time and memory of a plan, given as a file or by plan flags, without running it."""
    console = make_console(as_json)
    found = asked_cluster(cluster, hosts, nproc, console.print)
    asked = EstimateQuestion.ask(NamedModel(model), found, flags.request, flags.file, Limits(devices, memory))
    result = asked.answer()
    console.print(estimate_table(asked.plan, result))
    if explain:
        console.print(explain_table(asked.cluster))
    if as_json:
        figures_found = {"figures": msgspec.to_builtins(figures(asked.cluster))} if explain else {}
        print_json({**msgspec.to_builtins(result), **figures_found})
