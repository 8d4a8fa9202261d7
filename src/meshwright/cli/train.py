"""`meshwright train`: measure, plan, train, compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.cli.decision import Decision
    from meshwright.core.cluster import Cluster
    from meshwright.train.settings import Settings

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
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Train as FILE.toml says, on local ranks started here, or as one rank under torchrun.

    Measures this machine (cached), decides the plan, trains with a progress bar, and ends with predicted against measured.
    Ctrl-C stops within two steps, with a checkpoint; --resume goes on from it, on any number of ranks: `train FILE.toml --resume`,
    or `train --resume RUN` with the settings that the run folder holds.
    """
    from meshwright.cli.output import make_console
    from meshwright.cli.ready import OF_TRAINING, ready_ranks
    from meshwright.cli.train_settings import as_before, check_verify, read_settings
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
        "device": device,
        "backend": backend,
    }
    check_verify(resume, verify)
    settings = read_settings(file, flags, given, resume)
    if resume:
        settings = as_before(settings)
    console = make_console(as_json)
    if started_by_launcher():
        _under_launcher(settings, resume, console, as_json, verify)
    else:
        with ready_ranks(OF_TRAINING, settings.model):
            summary, decision = run_ranks(settings, resume, console, as_json, verify=verify)
        if summary is not None:
            _finish(settings, decision, summary, console, as_json)
        if summary is not None and summary["interrupted"]:
            raise typer.Exit(INTERRUPTED)


def run_ranks(
    settings: Settings, resume: bool, console: Console, as_json: bool, quiet: bool = False, verify: bool = False
) -> tuple[dict[str, Any] | None, Decision]:
    """Plan here, then start the ranks and wait for them. No summary where a resumed run had nothing left to do."""
    from meshwright.cli.restarting import Restarting
    from meshwright.core.cluster import Cluster
    from meshwright.core.errors import OutOfMemoryError
    from meshwright.runtime.launch import Interrupted
    from meshwright.runtime.restarts import Attempt, launch_with_restarts
    from meshwright.train.folder import RunFolder

    if resume and (done := _already_done(settings, console, as_json)):
        return None, done
    folder, decision = lay_out(settings, resume, console)
    payload = {
        "folder": str(folder), "resume": resume, "as_json": as_json, "terminal": console.is_terminal, "quiet": quiet,
        "verify": verify,
    }  # fmt: skip
    restarting = Restarting(settings, decision, console)
    first = Attempt(payload, decision.plan.world)
    try:
        summary = launch_with_restarts(
            "meshwright.cli.train_rank:train_rank",
            first,
            settings.faults.restarts,
            restarting.next_attempt,
            settings.timeout,
        )
    except OutOfMemoryError as error:
        from meshwright.cli.out_of_memory import with_ways_out

        raise with_ways_out(error, settings, restarting.decision, Cluster.load(RunFolder(folder).cluster)) from None
    except Interrupted as stop:
        if stop.result is None:
            raise
        return {**stop.result, "interrupted": True, "restarts": restarting.num_restarts}, restarting.decision
    return {**summary, "interrupted": False, "restarts": restarting.num_restarts}, restarting.decision


def lay_out(settings: Settings, resume: bool, console: Console) -> tuple[Any, Decision]:
    """Decide the plan of a run on local ranks, and write its folder."""
    from meshwright.cli.decision import check_batch, decide, precision_of_run, with_host_link, world_of_run
    from meshwright.cli.graphs import both_castings
    from meshwright.cli.train_settings import with_plan_of_before
    from meshwright.cli.wiring import find_cluster
    from meshwright.models.source import resolve
    from meshwright.train.boards import check_boards
    from meshwright.train.data import check_data
    from meshwright.train.optimizers import check_optimizer
    from meshwright.train.pretrained import check_weights

    check_batch(settings)
    source = resolve(settings.model)
    check_data(settings.data, source)
    check_optimizer(settings.optimizer)
    if not resume:
        check_weights(settings, source)
    check_boards(settings)
    world = world_of_run(settings)
    cluster = find_cluster(console, settings.cluster, settings.hosts, world, settings.device, settings.backend)
    cluster = with_host_link(cluster, settings)
    wish = with_plan_of_before(settings, world or cluster.num_devices) if resume else settings
    decision = decide(wish, both_castings(settings.model, precision_of_run(wish)), cluster, world)
    return _prepare(settings, decision, cluster, resume, console), decision


def _under_launcher(settings: Settings, resume: bool, console: Console, as_json: bool, verify: bool) -> None:
    """This process is a rank already: rank 0 plans, all follow."""
    import os

    import msgspec

    from meshwright.cli.decision import decide, precision_of_run, with_host_link
    from meshwright.cli.graphs import both_castings
    from meshwright.cli.restarted import continued, decision_again, note_launchers, placed
    from meshwright.cli.train_rank import run_rank
    from meshwright.cli.train_settings import with_plan_of_before
    from meshwright.core.errors import InputError
    from meshwright.measure.probe import measure_cluster
    from meshwright.runtime.gather import wait_for_all
    from meshwright.runtime.rank import leave
    from meshwright.runtime.ranks import first_rank_decides, joined
    from meshwright.train.folder import RunFolder

    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if settings.nproc is not None and settings.nproc != local:
        raise InputError(
            f"nproc is {settings.nproc}, but the launcher started {local} ranks on this host: leave nproc out under torchrun"
        )
    folder_of_run = RunFolder(settings.folder)
    with joined(settings.device, settings.backend, settings.timeout, folder_of_run.hang) as rank:
        settings, resume, goes_on = continued(settings, resume, rank, console)
        if resume and first_rank_decides(lambda: _already_done(settings, console, as_json) is not None, rank):
            leave(0)
        cluster = measure_cluster(rank) if settings.cluster == "local" and not goes_on else None

        def plan_it() -> tuple[str, Decision]:
            from meshwright.cli.wiring import find_cluster
            from meshwright.models.source import resolve
            from meshwright.train.pretrained import check_weights

            if goes_on:
                return str(folder_of_run.path), decision_again(settings, world, folder_of_run)
            if not resume:
                check_weights(settings, resolve(settings.model))
            found = with_host_link(cluster or find_cluster(console, settings.cluster, settings.hosts), settings)
            wish = with_plan_of_before(settings, world) if resume else settings
            decision = decide(wish, both_castings(settings.model, precision_of_run(wish)), found, world)
            return str(_prepare(settings, decision, found, resume, console)), decision

        folder, decision = first_rank_decides(plan_it, rank)
        note_launchers(folder_of_run, rank)
        payload = {
            "folder": folder, "resume": resume, "as_json": as_json, "terminal": console.is_terminal,
            "verify": verify and not goes_on,
        }  # fmt: skip
        with placed():
            summary = run_rank(payload, rank)
        if rank.is_first:
            _finish(settings, decision, msgspec.to_builtins(summary), console, as_json)
        wait_for_all()  # no rank leaves before the first has printed: the launcher would end it
    leave(0)


def _already_done(settings: Settings, console: Console, as_json: bool) -> Decision | None:
    """A run that has all its steps is shown again, not run again."""
    from meshwright.cli.decision import Decision
    from meshwright.core.estimate import Estimate
    from meshwright.core.plan import Plan
    from meshwright.train.checkpoint import latest
    from meshwright.train.folder import RunFolder
    from meshwright.train.kept import step_of
    from meshwright.train.metrics import last_values

    folder = RunFolder(settings.folder)
    newest = latest(folder.checkpoints)
    if newest is None or not folder.trace.exists() or step_of(newest) < settings.steps:
        return None
    console.print(f"{folder.path} has all its {settings.steps} steps already: give more with --steps", highlight=False)
    values = last_values(folder.metrics)
    summary = {
        "loss": values.get("loss"),
        "validation_loss": values.get("validation_loss"),
        "num_steps": step_of(newest),
        "stopped": None,
        "checkpoint": str(newest),
    }
    decision = Decision(Plan.load(folder.plan), Estimate.load(folder.estimate), None)
    _finish(settings, decision, summary, console, as_json)
    return decision


def _prepare(settings: Settings, decision: Decision, cluster: Cluster, resume: bool, console: Console) -> Any:
    """Show the plan and lay out the run folder."""
    from meshwright.core.result import describe
    from meshwright.report.plan_view import plan_view
    from meshwright.train.checkpoint import check_same_model
    from meshwright.train.folder import RunFolder

    if decision.result is not None:
        console.print(plan_view(decision.result, cluster))
    else:
        console.print(f"plan: {describe(decision.plan)}", highlight=False)
    folder = RunFolder(settings.folder)
    if resume:
        folder.reopen()
        check_same_model(folder.checkpoints, decision.plan.graph, lambda: _shapes(settings.model))
    elif moved := folder.start_fresh():
        console.print(f"{folder.path} held an earlier run: it is now {moved}", highlight=False)
    settings.save(folder.settings)
    decision.plan.save(folder.plan)
    decision.estimate.save(folder.estimate)
    cluster.save(folder.cluster)
    if decision.forecast is not None:
        decision.forecast.save(folder.forecast)
    if decision.result is not None:
        decision.result.save(folder.search)
    return folder.path


def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Of a model's tensors by name; takes no memory."""
    import torch

    from meshwright.models.source import resolve

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in resolve(model).build().state_dict().items()}


def _finish(settings: Settings, decision: Decision, summary: dict[str, Any], console: Console, as_json: bool) -> None:
    """Predicted against measured, and where everything is."""
    from meshwright.cli.output import print_json
    from meshwright.core.trace import Trace
    from meshwright.report.tables import comparison_table
    from meshwright.train.folder import RunFolder
    from meshwright.train.metrics import dropped_tokens

    folder = RunFolder(settings.folder)
    trace = Trace.load(folder.trace)
    dropped, routed = dropped_tokens(folder.metrics)
    console.print(comparison_table(decision.estimate, trace))
    ended = f"stopped after {summary['num_steps']} steps: {summary['stopped']}" if summary["stopped"] else "done"
    console.print(f"{ended}; loss {summary['loss']:.4f}; everything is in {folder.path}", highlight=False)
    if routed:
        share = f"{dropped / routed:.1%}"
        console.print(f"experts had no room for {dropped} of {routed} choices ({share})", highlight=False)
    if summary["stopped"]:
        console.print("its checkpoint is whole: the same command with --resume goes on from it", highlight=False)
    if as_json:
        print_json(
            {
                "loss": summary["loss"],
                "step_seconds": trace.step_seconds,
                "tokens_per_second": trace.tokens_per_second,
                "predicted_step_seconds": decision.estimate.step_seconds,
                "predicted_peak_bytes": decision.estimate.peak_bytes,
                "measured_peak_bytes": trace.peak_bytes,
                "dropped_tokens": dropped,
                "dropped_share": dropped / routed if routed else 0.0,
                "validation_loss": summary["validation_loss"],
                "num_steps": summary["num_steps"],
                "stopped": summary["stopped"],
                "restarts": summary.get("restarts", 0),
                "checkpoint": summary["checkpoint"],
                "run_folder": str(folder.path),
            }
        )
