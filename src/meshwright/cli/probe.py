"""`meshwright probe`: measure this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import BackendOption, DeviceOption, JsonFlag, NprocOption


def probe(
    nproc: NprocOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if a measurement is cached.")] = False,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Save as a cluster file, .json or .toml.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine with all ranks running at once: ops, memory, collectives. Takes seconds, is cached."""
    from meshwright.cli.output import make_console, print_json
    from meshwright.cli.wiring import probe_with_notice
    from meshwright.report.tables import cluster_table

    console = make_console(as_json)
    cluster = probe_with_notice(console, nproc, device, backend, fresh)
    console.print(cluster_table(cluster))
    if output is not None:
        console.print(f"saved as {cluster.save(output)}")
    if as_json:
        print_json(cluster)
