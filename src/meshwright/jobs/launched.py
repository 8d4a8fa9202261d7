"""A run whose ranks a launcher has started: torchrun, SLURM or Ray.

Where torchrun has started them again, the run goes on where it was, on as many ranks as there are now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from rich.console import Console

from meshwright.core.cluster import Cluster
from meshwright.core.codec import write_whole
from meshwright.core.errors import InputError, MeshwrightError, PlanError, RunError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.jobs.layout import lay_out_on, write_plan
from meshwright.jobs.rank import make_payload, run_rank
from meshwright.jobs.restarting import replan, resumable_step
from meshwright.jobs.settings import as_before
from meshwright.jobs.summary import show_again, show_summary
from meshwright.measure.probe import measure_cluster
from meshwright.models.source import resolve
from meshwright.planner.clusters import find_cluster
from meshwright.planner.decision import Decision
from meshwright.runtime.gather import wait_for_all
from meshwright.runtime.messages.exchange import all_ranks, from_first
from meshwright.runtime.rank import fault_of, leave, without_chatter
from meshwright.runtime.ranks import Rank, joined
from meshwright.runtime.restarts import launcher
from meshwright.training.folder import RunFolder
from meshwright.training.lock import RunLock
from meshwright.training.pretrained import check_weights
from meshwright.training.settings import Settings


def join_launched(settings: Settings, resume: bool, console: Console, as_json: bool, verify: bool) -> NoReturn:
    """This process is a rank already: rank 0 plans, all follow."""
    world = _world(settings)
    folder = RunFolder(settings.folder)
    with joined(settings.device, settings.backend, settings.timeout, folder.hang) as rank:
        settings, resume, goes_on = continued(settings, resume, rank, console)
        if resume and from_first(lambda: show_again(settings, console, as_json) is not None, bool):
            leave(0)
        cluster = measure_cluster(rank) if settings.cluster == "local" and not goes_on else None

        lock = RunLock(settings.folder, is_same_job=goes_on)

        decided: list[Decision] = []  # on the first rank, which shows it in the end

        def plan_it() -> dict[str, Any]:
            lock.take()
            try:
                if goes_on:
                    decision = decision_again(settings, world, folder)
                else:
                    decision = _plan(settings, world, resume, cluster, console, lock)
            except Exception:
                lock.release()
                raise
            decided.append(decision)
            return make_payload(folder.path, console, as_json, resume=resume, verify=verify and not goes_on)

        payload = from_first(plan_it, dict[str, Any])
        note_launchers(folder, rank)
        with placed():
            summary = run_rank(payload, rank)
        if rank.is_first:
            show_summary(settings, decided[0], msgspec.to_builtins(summary), console, as_json)
            lock.release()
        wait_for_all()  # no rank leaves before the first has printed: the launcher would end it
    leave(0)


def _world(settings: Settings) -> int:
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if settings.nproc is not None and settings.nproc != local:
        raise InputError(
            f"nproc is {settings.nproc}, but the launcher started {local} ranks on this host: leave nproc out under torchrun"
        )
    return world


def _plan(
    settings: Settings, world: int, resume: bool, measured: Cluster | None, console: Console, lock: RunLock
) -> Decision:
    """On the first rank: the plan, and the run folder."""
    if not resume:
        check_weights(settings, resolve(settings.model))
    cluster = measured or find_cluster(settings.cluster, settings.hosts, say=console.print)
    return lay_out_on(cluster, settings, world, resume, console, lock)[1]


def continued(settings: Settings, resume: bool, rank: Rank, console: Console) -> tuple[Settings, bool, bool]:
    """Settings, whether to resume, and whether this is a later start of the same job. Every rank calls it.

    It is one where some launcher of these ranks has started ranks for this run folder before. torch counts its own restarts too
    (TORCHELASTIC_RESTART_COUNT), but not those after hosts have come or gone, and not for which folder.
    """
    folder = RunFolder(settings.folder)
    launchers = all_ranks(launcher(), str)
    step = from_first(lambda: resumable_step(folder) if _is_same_job(folder, launchers) else None, int | None)
    if step is None:
        return settings, resume, False
    if rank.is_first:
        on = f"go on from step {step}" if step else "begin again: there is no checkpoint yet"
        console.print(f"started again by the launcher: {rank.num_ranks} ranks {on}")
    return as_before(settings) if step else settings, step > 0, True


def _is_same_job(folder: RunFolder, launchers: list[str]) -> bool:
    if not folder.launchers.exists() or not folder.plan.exists():
        return False
    return bool(set(folder.launchers.read_text(encoding="utf-8").split("\n")) & set(launchers))


def note_launchers(folder: RunFolder, rank: Rank) -> None:
    """For the next start. Every rank calls it."""
    launchers = all_ranks(launcher(), str)
    if rank.is_first:
        write_whole(folder.launchers, "\n".join(sorted(set(launchers))))


@contextmanager
def placed() -> Iterator[None]:
    """An error that no launcher of ours will put into words gets its place: rank, host, step and last collective."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        said = without_chatter(str(error))
        fault = fault_of(error, said)
        whose = f"rank {fault.ranks[0]} of {fault.num_ranks}"
        if fault.kind != "lost":
            error.add_note(f"{whose}: {fault.place}")
            raise
        words = f"{whose} lost the connection to another rank: {said}\n  {fault.place}"
        raise RunError(words, fault) from None


def decision_again(settings: Settings, world: int, folder: RunFolder) -> Decision:
    """The plan the run had, where it still fits the ranks; else one made anew, with which the folder goes on."""
    plan = Plan.load(folder.plan)
    if plan.world == world:
        return Decision(plan, Estimate.load(folder.estimate), None)
    _, decision = replan(settings, world, folder)
    if decision.plan.world != world:
        raise PlanError(
            f"no plan of global batch {plan.global_batch} runs on {world} ranks, but one does on {decision.plan.world}: start those"
        )
    write_plan(folder, Settings.load(folder.settings), decision)
    return decision
