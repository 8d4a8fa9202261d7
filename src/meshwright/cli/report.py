"""`meshwright report`: how a run compared with what was promised, in the terminal or as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from meshwright.cli.options import JsonFlag
from meshwright.core.codec import write_whole
from meshwright.core.errors import InputError
from meshwright.core.result import describe
from meshwright.jobs.output import make_console, print_json
from meshwright.jobs.runs import check_comparable, read_runs, write_page
from meshwright.report.chrome import chrome_trace
from meshwright.report.contest import said_about
from meshwright.report.contest_table import contest_tables
from meshwright.report.fullest import fullest_words
from meshwright.report.run import Run
from meshwright.report.tables import comparison_table
from meshwright.report.verdict import verdict


def report(
    folders: Annotated[list[str], Argument(metavar="RUN_FOLDER...")],
    output: Annotated[
        str | None, Option("-o", "--output", metavar="FILE.html", help="Write one page that needs nothing else.")
    ] = None,
    chrome: Annotated[
        str | None, Option(metavar="FILE.json", help="Write the sampled step of all ranks for ui.perfetto.dev.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show finished runs: each plan, and predicted against measured.

    \b
    In the terminal:                 meshwright report runs/demo
    As one self-contained page:      meshwright report runs/demo -o report.html
    Several runs of one model:       meshwright report runs/ddp runs/zero3 -o report.html
    What a comparison has left:      meshwright report runs/demo-compare -o report.html
    For ui.perfetto.dev:             meshwright report runs/demo --chrome trace.json
    """
    runs = read_runs(folders)
    check_comparable(runs)
    console = make_console(as_json)
    for run in runs:
        trace = run.worst
        assert trace is not None
        console.print(f"{run.name}: {describe(run.plan)}, {trace.num_steps} steps")
        console.print(comparison_table(run.estimate, trace, run.unit))
        console.print("\n".join((*verdict(run), *_fullest(run))))
    if len(runs) > 1:
        show_together(runs, None, console)
    if output is not None:
        console.print(f"saved as {write_page(runs, output)}")
    if chrome is not None:
        console.print(f"saved as {_write_chrome(runs, chrome)}: open it in ui.perfetto.dev")
    if as_json:
        objects = [{"run": run.name, "plan": run.plan, "estimate": run.estimate, "trace": run.worst} for run in runs]
        print_json(objects[0] if len(objects) == 1 else {"runs": objects})


def _fullest(run: Run) -> tuple[str, ...]:
    words = fullest_words(run)
    return (f"{words[0].upper()}{words[1:]}.",) if words else ()


def show_together(runs: list[Run], epoch_steps: int | None, console: Console) -> None:
    """Tables and findings of several runs. epoch_steps: of the data, where known."""
    for table in contest_tables(runs, epoch_steps):
        console.print(table)
    for sentence in said_about(runs):
        console.print(sentence)


def _write_chrome(runs: list[Run], file: str) -> str:
    if len(runs) > 1:
        raise InputError("--chrome shows one run: give one RUN_FOLDER")
    return str(write_whole(Path(file), chrome_trace(runs[0].traces)))
