"""Several plans on the same data, one after another: what may be compared, and the runs themselves."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
from rich.console import Console

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.jobs.layout import lay_out
from meshwright.jobs.local import run_ranks
from meshwright.jobs.runs import read_run, together
from meshwright.models.source import resolve
from meshwright.planner.short_plans import Contender, parse_short
from meshwright.report.run import Run
from meshwright.runtime.launch import check_num_ranks, launch
from meshwright.training.data import check_data, steps_per_epoch
from meshwright.training.folder import move_aside
from meshwright.training.lock import RunLock
from meshwright.training.peers import LIKE, check_peer, peers_named
from meshwright.training.settings import Settings


def make_room(folder: Path, is_chosen: bool, console: Console) -> None:
    """An earlier comparison of the same study is moved aside; what somebody named is not touched."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if is_chosen:
        raise InputError(f"{folder} holds an earlier comparison, or something else: choose another with --out")
    console.print(f"{folder} held an earlier comparison: it is now {move_aside(folder)}")


def check_fair(settings: Settings, chosen: list[Contender]) -> int | None:
    """What would make the comparison unfair or impossible is refused; returns the steps of an epoch, where known."""
    if len(chosen) < 2:
        raise InputError("fewer than two plans are left to compare: give more with --plans or --nproc")
    if settings.plan.global_batch is None or settings.plan_file is not None:
        raise InputError(
            "plans are compared on the same global batches: set global_batch under [plan], and name no plan_file"
        )
    for count in {one.num_ranks for one in chosen}:
        check_num_ranks(count)
    source = resolve(settings.model)
    check_data(settings.data, source)
    return steps_per_epoch(settings.data, source, settings.plan.global_batch, settings.seed)


def peer_contenders(settings: Settings, names: str | None, nprocs: tuple[int, ...]) -> list[Contender]:
    """Other libraries, on every number of ranks above one."""
    if names is None:
        return []
    found = []
    for peer in peers_named(names):
        for count in (count for count in dict.fromkeys(nprocs) if count > 1):
            check_peer(peer, settings, count)
            found.append(Contender(short=LIKE.get(peer, "ddp"), num_ranks=count, peer=peer))
    return found


def run_all(
    settings: Settings, chosen: list[Contender], repeats: int, folder: Path, console: Console
) -> tuple[list[Run], dict[str, str]]:
    """All plans in a new order each round. A plan that fails once is not tried again."""
    found: dict[str, list[Run]] = {one.name: [] for one in chosen}
    failed: dict[str, str] = {}
    shuffled = random.Random(settings.seed)
    for number in range(repeats):
        for one in shuffled.sample(chosen, len(chosen)):
            if one.name in failed:
                continue
            console.print(f"round {number + 1} of {repeats}: {one.name} …")
            try:
                found[one.name].append(_run_one(settings, one, folder / one.name.replace(" ", "-") / str(number)))
            except KeyboardInterrupt:
                console.print(f"stopped: `meshwright report {folder} -o report.html` shows what has run")
                raise
            except MeshwrightError as error:
                failed[one.name] = str(error)
                console.print(f"  failed: {error}")
    return [together(runs) for name, runs in found.items() if runs and name not in failed], failed


def _run_one(settings: Settings, one: Contender, folder: Path) -> Run:
    changed = msgspec.structs.replace(
        settings,
        plan=settings.plan.updated(parse_short(one.short)),
        planner="search" if one.is_searched else "plain",
        nproc=one.num_ranks,
        out=str(folder),
        tensorboard=False,
    )
    if one.peer:
        _train_peer(changed, one.peer)
    else:
        _train(changed)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return read_run(str(folder), one.name)


def _train(settings: Settings) -> None:
    summary = run_ranks(settings, resume=False, console=Console(quiet=True), as_json=False, quiet=True)
    if summary.interrupted:
        raise KeyboardInterrupt


def _train_peer(settings: Settings, peer: str) -> None:
    """In a folder of the plan of ours that does the same: its estimate stands beside what the peer takes."""
    with RunLock(settings.folder) as lock:
        folder, decision = lay_out(settings, resume=False, console=Console(quiet=True), lock=lock)
        launch("meshwright.jobs.rank:peer_rank", {"folder": str(folder), "peer": peer}, decision.plan.world)
