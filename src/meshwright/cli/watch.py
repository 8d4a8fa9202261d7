"""`meshwright watch`: a running job in the terminal, and as a page on this machine."""

from __future__ import annotations

import time
from typing import Annotated

from rich.console import Console, Group
from rich.live import Live
from typer import Argument, Option

from meshwright.jobs.live_page import served_page
from meshwright.jobs.metric_lines import MetricLines
from meshwright.jobs.output import make_console
from meshwright.jobs.runs import has_ended, rank_states, read_run
from meshwright.report.live_view import live_view
from meshwright.training.folder import RunFolder
from meshwright.training.settings import Settings


def watch(
    folder: Annotated[str, Argument(metavar="RUN_FOLDER")],
    port: Annotated[
        int | None, Option(min=0, max=65535, help="Serve the page on this port of localhost; 0: any.")
    ] = None,
    every: Annotated[float, Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Show what is known now, and end.")] = False,
) -> None:
    """Watch a run: loss, tokens per second, memory of each rank, the slowest rank; until it ends.

    \b
      meshwright watch runs/demo
      meshwright watch runs/demo --port 8080      the same as a page, at http://localhost:8080
    The page is the report as far as it is known, and follows the run by itself. Nothing but this machine can open it.
    """
    run = RunFolder(folder)
    read_run(folder, is_live=True)  # what is no run is refused before anything is shown
    console = make_console(as_json=False)
    if once:
        console.print(_look(run))
    elif port is None:
        _follow(run, console, every)
    else:
        with served_page(run, port, every) as address:
            console.print(f"the page: {address}")
            _follow(run, console, every)


def _follow(folder: RunFolder, console: Console, every: float) -> None:
    """Look again and again; away from a terminal each look is printed."""
    lines = MetricLines(folder.metrics)
    if not console.is_terminal:
        console.print(_look(folder, lines))
        while not has_ended(folder):
            time.sleep(every)
            console.print(_look(folder, lines))
    else:
        with Live(_look(folder, lines), console=console, auto_refresh=False, transient=False) as view:
            while not has_ended(folder):
                time.sleep(every)
                view.update(_look(folder, lines), refresh=True)
    console.print(f"the run has ended: `meshwright report {folder.path} -o report.html` shows all of it")


def _look(folder: RunFolder, lines: MetricLines | None = None) -> Group:
    run = read_run(str(folder.path), is_live=True, lines=lines)
    return live_view(run, rank_states(folder), Settings.load(folder.settings).steps, time.time())
