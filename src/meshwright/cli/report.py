"""`meshwright report`: how a run compared with what was promised."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import JsonFlag


def report(
    folder: Annotated[str, typer.Argument(metavar="RUN_FOLDER")],
    as_json: JsonFlag = False,
) -> None:
    """Show a finished run: its plan, and predicted against measured."""
    from meshwright.cli.output import make_console, print_json
    from meshwright.core.errors import InputError
    from meshwright.core.estimate import Estimate
    from meshwright.core.plan import Plan
    from meshwright.core.result import describe
    from meshwright.core.trace import Trace
    from meshwright.report.tables import comparison_table
    from meshwright.train.folder import RunFolder

    run = RunFolder(folder)
    if not run.settings.exists():
        raise InputError(f"{run.path} is not a run folder: it has no settings.toml")
    if not run.trace.exists():
        raise InputError(f"{run.path} has no trace.json: the run has not finished a step, or it failed")
    plan, estimate, trace = Plan.load(run.plan), Estimate.load(run.estimate), Trace.load(run.trace)
    console = make_console(as_json)
    console.print(f"{run.path}: {describe(plan)}, {trace.num_steps} steps", highlight=False)
    console.print(comparison_table(estimate, trace))
    if as_json:
        print_json({"plan": plan, "estimate": estimate, "trace": trace})
