"""`meshwright doctor`: is this machine fit to train, and what to fix."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from typer import Option

from meshwright.cli.options import BackendOption, DeviceOption, JsonFlag
from meshwright.jobs.output import make_console, print_json
from meshwright.jobs.ready import LOADED, ready_ranks
from meshwright.measure.checkup.finding import Finding
from meshwright.planner.clusters import check_device
from meshwright.runtime.rank import leave, started_by_launcher

MARKS = {"ok": "ok      ", "warning": "warning ", "problem": "PROBLEM "}


def doctor(
    out: Annotated[str, Option(help="Where runs are to be written; its disk is checked.")] = "runs",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Check Python, torch, backends, devices, peers, links, disk, cache, clock, ports, limits, compiler; say what to fix.

    The exit code is 1 where runs would fail.

    Under torchrun, or `meshwright launch --verb doctor`: all hosts, the links between them, and whether their clocks agree.
    """
    check_device(device, backend)
    console = make_console(as_json)
    if started_by_launcher():
        _as_a_rank(out, device, backend, console, as_json)
        return
    with ready_ranks((*LOADED, "meshwright.measure.checkup.between")):
        from meshwright.measure.checkup.checkup import check_alone

        findings = check_alone(Path(out), device, backend)
    if _show(findings, console, as_json):
        raise typer.Exit(1)


def _as_a_rank(out: str, device: str, backend: str, console: Console, as_json: bool) -> None:
    """This process is a rank already: the first rank of each host checks the host, and all ranks check the links between hosts."""
    from meshwright.measure.checkup.between import check_between
    from meshwright.measure.checkup.checkup import check_machine
    from meshwright.runtime.gather import wait_for_all
    from meshwright.runtime.messages.exchange import all_ranks
    from meshwright.runtime.ranks import joined

    with joined(device, backend) as rank:  # type: ignore[arg-type]
        host = f"{socket.gethostname()} (host {os.environ.get('GROUP_RANK', '0')})"
        own = check_machine(Path(out)) if rank.local_number == 0 else []
        seen = [msgspec.structs.replace(finding, host=host) for finding in own]
        findings = [finding for one in all_ranks(seen, list[Finding]) for finding in one] + check_between(rank)
        has_problem = _show(findings, console, as_json) if rank.is_first else False
        has_problem = any(all_ranks(has_problem, bool))
        wait_for_all()  # no rank leaves before the first has printed: the launcher would end it
    leave(int(has_problem))


def _show(findings: list[Finding], console: Console, as_json: bool) -> bool:
    """Print them; returns whether one is a problem."""
    host = ""
    for finding in findings:
        if finding.host != host:
            host = finding.host
            console.print(host or "between ranks", style="bold")
        console.print(f"{MARKS[finding.status]} {finding.check}: {finding.found}", soft_wrap=True)
        if finding.fix:
            console.print(f"         fix: {finding.fix}", soft_wrap=True)
    counts = {status: sum(finding.status == status for finding in findings) for status in MARKS}
    words = f"{counts['ok']} checks are fine, {counts['warning']} warnings, {counts['problem']} problems"
    console.print(words)
    if as_json:
        print_json({"ok": not counts["problem"], "findings": findings})
    return bool(counts["problem"])
