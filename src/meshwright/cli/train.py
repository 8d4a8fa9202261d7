"""`meshwright train`: measure, plan, train, compare."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from meshwright.cli import options
from meshwright.jobs.output import make_run_console
from meshwright.jobs.train import run

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@options.plan_flags
def train(
    file: Annotated[str, Argument(metavar="FILE.toml", help="Or, with --resume, the folder of a run.")],
    flags: options.PlanFlags,
    nproc: options.NprocOption = None,
    steps: Annotated[int | None, Option(min=1, help="Optimizer steps in all.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest checkpoint of the run folder.")] = False,
    verify: Annotated[
        bool, Option("--verify", help="With --resume: first replay one step, and compare it with what was recorded.")
    ] = False,
    out: Annotated[str | None, Option(help="Run folder. Default: runs/NAME.")] = None,
    seed: options.SeedOption = None,
    memory: options.MemoryOption = None,
    timeout: options.TimeoutOption = None,
    restarts: Annotated[
        int | None, Option(min=0, help="Restart from the last checkpoint after a fault, up to N times.")
    ] = None,
    fewer_ranks: Annotated[
        bool, Option("--fewer-ranks", help="After a fault, go on without the rank that was lost.")
    ] = False,
    find_nan: Annotated[
        bool, Option("--find-nan", help="Check every block: name the first that gave NaN or infinity. Slow.")
    ] = False,
    no_check: Annotated[
        bool, Option("--no-check", help="Do not compare a small copy of the model with one process before the run.")
    ] = False,
    device: options.DeviceOption = "auto",
    backend: options.BackendOption = "auto",
    as_json: options.JsonFlag = False,
) -> None:
    """Train as FILE.toml says, on local ranks started here, or as one rank under torchrun.

    Measures this machine (cached), decides the plan, compares a small copy of your own model with one process where the plan
    divides it (once; --no-check leaves it out), trains with a progress bar, and ends with predicted against measured.
    Ctrl-C stops within two steps, with a checkpoint; --resume goes on from it, on any number of ranks: `train FILE.toml --resume`,
    or `train --resume RUN` with the settings that the run folder holds.
    """
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
    found = run(file, flags.request, flags.file, given, resume, verify, make_run_console(as_json), as_json)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
