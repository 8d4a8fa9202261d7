"""`meshwright compare`: several plans on the same data, one after another, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from meshwright.cli.options import JsonFlag, SeedOption
from meshwright.cli.report import show_together
from meshwright.core.errors import InputError, RunError
from meshwright.jobs.output import make_console, print_json
from meshwright.jobs.ready import OF_TRAINING, ready_ranks
from meshwright.jobs.runs import write_page
from meshwright.jobs.settings import load_settings
from meshwright.planner.short_plans import contenders
from meshwright.report.contest import findings, judge, loss_words, rows_of
from meshwright.report.run import Run
from meshwright.training.settings import CompareSettings, Settings


def compare(
    file: Annotated[str, Argument(metavar="FILE.toml")],
    plans: Annotated[
        str | None, Option(help="Short names, such as one,ddp,zero1,zero3,tp2,pp2,pp2+zero1,search.")
    ] = None,
    nproc: Annotated[str | None, Option(help="Numbers of ranks, such as 1,2,4.")] = None,
    repeat: Annotated[int | None, Option(min=1, help="Runs of each plan, against noise.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Optimizer steps of each run.")] = None,
    seed: SeedOption = None,
    out: Annotated[str | None, Option(help="Folder of the runs. Default: runs/NAME-compare.")] = None,
    peers: Annotated[
        str | None, Option("--with", help="Other libraries on the same data: torch, deepspeed, accelerate, fabric.")
    ] = None,
    output: Annotated[
        str | None, Option("-o", "--output", metavar="FILE.html", help="The page. Default: report.html in --out.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train FILE.toml's model under several plans, with the same data and seed, and tabulate what each took.

    \b
      meshwright compare examples/demo.toml --plans ddp,zero1,zero2,zero3,tp2,pp2 --nproc 1,2,4 --repeat 3
      meshwright compare examples/resnet101-study.toml
    Runs are shuffled and repeated, so that a slow hour of the machine does not fall on one plan alone; losses must agree. A
    [compare] table in the file gives what the flags leave out. Each run's folder stays, without its checkpoint.
    """
    settings, wanted = _read(file, plans, nproc, repeat, {"steps": steps, "seed": seed})
    chosen, left_out = contenders(wanted.plans, wanted.nproc)
    console = make_console(as_json)
    folder = Path(out or f"runs/{settings.name}-compare")
    with ready_ranks(OF_TRAINING, settings.model):
        from meshwright.jobs.comparison import check_fair, make_room, peer_contenders, run_all  # brings torch

        chosen += peer_contenders(settings, peers, wanted.nproc)
        epoch_steps = check_fair(settings, chosen)
        make_room(folder, is_chosen=out is not None, console=console)
        for words in left_out:
            console.print(f"left out: {words}")
        runs, failed = run_all(settings, chosen, wanted.repeat, folder, console)
    if not runs:
        raise RunError(f"no plan ran: {'; '.join(f'{name}: {reason}' for name, reason in failed.items())}")
    show_together(runs, epoch_steps, console)
    for name, reason in failed.items():
        console.print(f"{name} did not run: {reason}")
    page = str(write_page(runs, output or str(folder / "report.html")))
    console.print(f"saved as {page}")
    if as_json:
        print_json(_as_object(runs, epoch_steps) | {"failed": failed, "left_out": left_out, "report": page})


def _read(
    file: str, plans: str | None, nproc: str | None, repeat: int | None, given: dict[str, Any]
) -> tuple[Settings, CompareSettings]:
    """The file, with what the command line says put over it."""
    settings = load_settings(file)
    wanted = settings.compare or CompareSettings()
    changes: dict[str, Any] = {}
    if plans is not None:
        changes["plans"] = tuple(word.strip() for word in plans.split(","))
    if nproc is not None:
        changes["nproc"] = tuple(_whole(word, nproc) for word in nproc.split(","))
    if repeat is not None:
        changes["repeat"] = repeat
    known = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(settings, compare=None, **known), msgspec.structs.replace(wanted, **changes)


def _whole(word: str, text: str) -> int:
    if not word.strip().isdecimal() or int(word) < 1:
        raise InputError(f"--nproc {text}: '{word.strip()}' is not a number of ranks: write it like 1,2,4")
    return int(word)


def _as_object(runs: list[Run], epoch_steps: int | None) -> dict[str, Any]:
    """The comparison as one JSON object."""
    judgement = judge(runs)
    return {
        "winner": judgement.first.name if judgement else runs[0].name,
        **{name: getattr(judgement, name, None) for name in ("margin", "noise", "exceeds_noise")},
        "runs": rows_of(runs, epoch_steps),
        "findings": findings(runs),
        "warning": loss_words(runs),
    }
