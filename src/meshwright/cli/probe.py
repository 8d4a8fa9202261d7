"""`meshwright probe`: measure this machine."""

from __future__ import annotations

import os
from typing import Annotated

from rich.console import Console
from typer import Option

from meshwright.cli.options import BackendOption, DeviceOption, JsonFlag, NprocOption
from meshwright.core.cluster import Cluster
from meshwright.core.errors import InputError
from meshwright.jobs.output import make_console, print_json
from meshwright.jobs.ready import LOADED, ready_ranks
from meshwright.planner.clusters import check_device, probed
from meshwright.report.tables import cluster_table
from meshwright.runtime.rank import leave, started_by_launcher


def probe(
    nproc: NprocOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    fresh: Annotated[bool, Option("--fresh", help="Measure again, even if a measurement is cached.")] = False,
    output: Annotated[str | None, Option("-o", "--output", help="Save as a cluster file, .json or .toml.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine with all ranks running at once: ops, memory, collectives. Takes seconds, is cached.

    Under torchrun, or `meshwright launch --verb probe`: all hosts, and the links inside and between them; -o keeps the result.
    """
    console = make_console(as_json)
    if started_by_launcher():
        _as_a_rank(nproc, device, backend, output, console, as_json)
    else:
        with ready_ranks((*LOADED, "meshwright.measure.probe")):
            cluster = probed(nproc, device, backend, fresh, console.print)
        _show(cluster, output, console, as_json)


def _as_a_rank(
    nproc: int | None, device: str, backend: str, output: str | None, console: Console, as_json: bool
) -> None:
    """This process is a rank already: all measure together, the first speaks. Nothing is cached: the next hosts may be others."""
    from meshwright.measure.probe import measure_cluster
    from meshwright.runtime.gather import wait_for_all
    from meshwright.runtime.ranks import joined

    check_device(device, backend)
    if nproc is not None and nproc != int(os.environ.get("LOCAL_WORLD_SIZE", nproc)):
        raise InputError(f"--nproc {nproc}, but the launcher started other ranks: leave it out under torchrun")
    with joined(device, backend) as rank:  # type: ignore[arg-type]
        cluster = measure_cluster(rank)
        if rank.is_first:
            _show(cluster, output, console, as_json)
        wait_for_all()  # no rank leaves before the first has printed: the launcher would end it
    leave(0)


def _show(cluster: Cluster, output: str | None, console: Console, as_json: bool) -> None:
    console.print(cluster_table(cluster))
    if cluster.num_hosts > 1:
        for note in cluster.notes:
            console.print(note)
    if output is not None:
        console.print(f"saved as {cluster.save(output)}")
    if as_json:
        print_json(cluster)
