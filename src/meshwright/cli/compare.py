"""`meshwright compare`: several plans on the same data, one after another, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import JsonFlag

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.report.run import Run
    from meshwright.training.settings import CompareSettings, Settings


def compare(
    file: Annotated[str, typer.Argument(metavar="FILE.toml")],
    plans: Annotated[
        str | None, typer.Option("--plans", help="Short names, such as one,ddp,zero1,zero3,tp2,pp2,pp2+zero1,search.")
    ] = None,
    nproc: Annotated[str | None, typer.Option("--nproc", help="Numbers of ranks, such as 1,2,4.")] = None,
    repeat: Annotated[int | None, typer.Option("--repeat", min=1, help="Run each so often, against noise.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps of each run.")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    out: Annotated[str | None, typer.Option("--out", help="Folder of the runs. Default: runs/NAME-compare.")] = None,
    peers: Annotated[
        str | None,
        typer.Option("--with", help="Other libraries on the same data: torch, deepspeed, accelerate, fabric."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE.html", help="The page. Default: report.html in --out.")
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
    from pathlib import Path

    from meshwright.core.errors import RunError
    from meshwright.jobs.comparison import check_fair, make_room, peer_contenders, run_all
    from meshwright.jobs.output import make_console
    from meshwright.jobs.ready import OF_TRAINING, ready_ranks
    from meshwright.planner.short_plans import contenders

    settings, wanted = _read(file, plans, nproc, repeat, {"steps": steps, "seed": seed})
    chosen, left_out = contenders(wanted.plans, wanted.nproc)
    chosen += peer_contenders(settings, peers, wanted.nproc)
    console = make_console(as_json)
    folder = Path(out or f"runs/{settings.name}-compare")
    with ready_ranks(OF_TRAINING, settings.model):
        epoch_steps = check_fair(settings, chosen)
        make_room(folder, is_chosen=out is not None, console=console)
        for words in left_out:
            console.print(f"left out: {words}", highlight=False)
        runs, failed = run_all(settings, chosen, wanted.repeat, folder, console)
    if not runs:
        raise RunError(f"no plan ran: {'; '.join(f'{name}: {reason}' for name, reason in failed.items())}")
    _show(runs, failed, epoch_steps, console)
    page = _write(runs, output or str(folder / "report.html"), console)
    if as_json:
        _print_json(runs, failed, left_out, epoch_steps, page)


def _read(
    file: str, plans: str | None, nproc: str | None, repeat: int | None, given: dict[str, Any]
) -> tuple[Settings, CompareSettings]:
    """The file, with what the command line says put over it."""
    import msgspec

    from meshwright.jobs.settings import load_settings
    from meshwright.training.settings import CompareSettings

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
    from meshwright.core.errors import InputError

    if not word.strip().isdecimal() or int(word) < 1:
        raise InputError(f"--nproc {text}: '{word.strip()}' is not a number of ranks: write it like 1,2,4")
    return int(word)


def _show(runs: list[Run], failed: dict[str, str], epoch_steps: int | None, console: Console) -> None:
    from meshwright.report.contest import said_about
    from meshwright.report.contest_table import contest_tables

    for table in contest_tables(runs, epoch_steps):
        console.print(table)
    for sentence in said_about(runs):
        console.print(sentence, highlight=False)
    for name, reason in failed.items():
        console.print(f"{name} did not run: {reason}", highlight=False)


def _write(runs: list[Run], file: str, console: Console) -> str:
    from meshwright.jobs.runs import write_page

    written = str(write_page(runs, file))
    console.print(f"saved as {written}", highlight=False)
    return written


def _print_json(
    runs: list[Run], failed: dict[str, str], left_out: list[str], epoch_steps: int | None, page: str
) -> None:
    from meshwright.jobs.output import print_json
    from meshwright.report.contest import findings, judge, loss_words, rows_of

    judgement = judge(runs)
    print_json(
        {
            "winner": judgement.first.name if judgement else runs[0].name,
            "margin": judgement.margin if judgement else None,
            "noise": judgement.noise if judgement else None,
            "exceeds_noise": judgement.exceeds_noise if judgement else None,
            "runs": rows_of(runs, epoch_steps),
            "findings": findings(runs),
            "warning": loss_words(runs),
            "failed": failed,
            "left_out": left_out,
            "report": page,
        }
    )
