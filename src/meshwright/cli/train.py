"""`meshwright train`: measure, plan, train, compare."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.options import (
    BackendOption,
    DeviceOption,
    JsonFlag,
    MemoryOption,
    NprocOption,
    PlanFlags,
    TimeoutOption,
    plan_flags,
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@plan_flags
def train(
    file: Annotated[str, typer.Argument(metavar="FILE.toml", help="Or, with --resume, the folder of a run.")],
    flags: PlanFlags,
    nproc: NprocOption = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps in all.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run folder.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="With --resume: first replay one step, and compare it with what was recorded."),
    ] = False,
    out: Annotated[str | None, typer.Option("--out", help="Run folder. Default: runs/NAME.")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    memory: MemoryOption = None,
    timeout: TimeoutOption = None,
    restarts: Annotated[
        int | None, typer.Option("--restarts", min=0, help="Go on from the last checkpoint after a fault, so often.")
    ] = None,
    fewer_ranks: Annotated[
        bool, typer.Option("--fewer-ranks", help="After a fault, go on without the rank that was lost.")
    ] = False,
    find_nan: Annotated[
        bool, typer.Option("--find-nan", help="Check every block: name the first that gave NaN or infinity. Slow.")
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option("--no-check", help="Do not compare a small copy of the model with one process before the run."),
    ] = False,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Train as FILE.toml says, on local ranks started here, or as one rank under torchrun.

    Measures this machine (cached), decides the plan, compares a small copy of your own model with one process where the plan
    divides it (once; --no-check leaves it out), trains with a progress bar, and ends with predicted against measured.
    Ctrl-C stops within two steps, with a checkpoint; --resume goes on from it, on any number of ranks: `train FILE.toml --resume`,
    or `train --resume RUN` with the settings that the run folder holds.
    """
    from meshwright.cli.output import make_console
    from meshwright.cli.ready import OF_TRAINING, ready_ranks
    from meshwright.cli.train_launched import join_launched
    from meshwright.cli.train_local import run_ranks
    from meshwright.cli.train_settings import as_before, check_verify, put_right, read_settings
    from meshwright.cli.train_summary import show_summary
    from meshwright.runtime.rank import started_by_launcher

    given = {
        "nproc": nproc,
        "steps": steps,
        "out": out,
        "seed": seed,
        "memory": memory,
        "timeout": timeout,
        "restarts": restarts,
        "fewer_ranks": fewer_ranks or None,
        "find_nan": find_nan or None,
        "check": False if no_check else None,
        "device": device,
        "backend": backend,
    }
    check_verify(resume, verify)
    console = make_console(as_json)
    if resume and not started_by_launcher():
        put_right(file, out, console)
    settings = read_settings(file, flags, given, resume)
    if resume:
        settings = as_before(settings)
    if started_by_launcher():
        join_launched(settings, resume, console, as_json, verify)
    else:
        with ready_ranks(OF_TRAINING, settings.model):
            summary, decision = run_ranks(settings, resume, console, as_json, verify=verify)
        if summary is not None:
            show_summary(settings, decision, summary, console, as_json)
        if summary is not None and summary["interrupted"]:
            raise typer.Exit(INTERRUPTED)
