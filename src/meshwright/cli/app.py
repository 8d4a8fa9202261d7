"""All verbs in one application."""

from __future__ import annotations

import typer

from meshwright.cli.capture import capture
from meshwright.cli.compare import compare
from meshwright.cli.doctor import doctor
from meshwright.cli.estimate import estimate
from meshwright.cli.export import export
from meshwright.cli.launch import launch
from meshwright.cli.models import models
from meshwright.cli.parity import parity
from meshwright.cli.plan import plan
from meshwright.cli.probe import probe
from meshwright.cli.report import report
from meshwright.cli.score import score
from meshwright.cli.sweep import sweep
from meshwright.cli.train import train
from meshwright.cli.watch import watch

app = typer.Typer(
    name="meshwright",
    help=(
        "Which parallelism, for my model, on my cluster? Plan it, run it, see how the run compared with the promise.\n\n"
        "A MODEL is gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50304, or path/to/file.py:function, or hf:CONFIG.json.\n\n"
        "A CLUSTER is a name, a file, or 'local': this machine, measured."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
for verb in (
    probe,
    models,
    capture,
    estimate,
    plan,
    sweep,
    train,
    export,
    parity,
    compare,
    report,
    watch,
    score,
    launch,
    doctor,
):
    app.command()(verb)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and end."),
) -> None:
    if show:
        from meshwright.core.version import VERSION

        print(VERSION)
        raise typer.Exit
