"""One run from its settings: read, resumed where asked, planned, trained on ranks of this host or of a launcher, summed up."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, Unpack

from rich.console import Console

from meshwright.core.errors import InputError
from meshwright.core.request import PlanRequest
from meshwright.jobs.output import make_run_console
from meshwright.jobs.ready import OF_TRAINING, ready_ranks
from meshwright.jobs.settings import as_before, put_right, read_settings
from meshwright.jobs.summary import RunSummary
from meshwright.planner.flags import PlanFlags, request_of
from meshwright.runtime.rank import started_by_launcher


def train(
    file: str | PathLike[str],
    *,
    nproc: int | None = None,
    steps: int | None = None,
    resume: bool = False,
    verify: bool = False,
    out: str | PathLike[str] | None = None,
    seed: int | None = None,
    memory: str | int | None = None,
    timeout: float | None = None,
    restarts: int | None = None,
    fewer_ranks: bool = False,
    find_nan: bool = False,
    check: bool = True,
    device: str = "auto",
    backend: str = "auto",
    plan: str | PathLike[str] | None = None,
    quiet: bool = False,
    **flags: Unpack[PlanFlags],
) -> RunSummary:
    """Train as a settings file says, on ranks that are started on this host; `meshwright train` from Python.

        found = mw.train("examples/gpt-small.toml", nproc=2, zero=2)
        print(found.loss, found.predicted_step_seconds, found.step_seconds)
        mw.train("runs/gpt-small", resume=True, steps=400)

    file: a .toml file, or, with resume, the folder of a run. Every setting that the command line takes is a keyword, and so is
    every plan flag (as of `mw.plan`); plan is a plan file. quiet: no progress on standard error. Under torchrun the process is
    one rank of the run, and ends with it. Raises what the command would say.
    """
    given = {
        "nproc": nproc, "steps": steps, "out": None if out is None else fspath(out), "seed": seed, "memory": memory,
        "timeout": timeout, "restarts": restarts, "fewer_ranks": fewer_ranks or None, "find_nan": find_nan or None,
        "check": None if check else False, "device": device, "backend": backend,
    }  # fmt: skip
    return run(
        fspath(file), request_of(flags, train), None if plan is None else fspath(plan), given, resume, verify,
        make_run_console(as_json=True, quiet=quiet), quiet=quiet,
    )  # fmt: skip


def run(
    file: str,
    request: PlanRequest,
    plan_file: str | None,
    given: dict[str, Any],
    resume: bool,
    verify: bool,
    console: Console,
    as_json: bool = False,
    quiet: bool = False,
) -> RunSummary:
    """given: what the caller says over the file. On a rank that a launcher started it does not return: the rank leaves when the run
    is done."""
    if verify and not resume:
        raise InputError("--verify compares a resumed run with what was recorded: give --resume too")
    is_rank = started_by_launcher()
    if resume and not is_rank:
        put_right(file, given["out"], console)
    settings = read_settings(file, request, plan_file, given, resume)
    if resume:
        settings = as_before(settings)
    if is_rank:
        from meshwright.jobs.launched import join_launched

        join_launched(settings, resume, console, as_json, verify)
    with ready_ranks(OF_TRAINING, settings.model):
        from meshwright.jobs.local import run_ranks  # brings torch, as the ranks are to have it

        return run_ranks(settings, resume, console, as_json, quiet=quiet, verify=verify)
