"""A run whose ranks a launcher has started: torchrun, SLURM or Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.core.cluster import Cluster
    from meshwright.planner.decision import Decision
    from meshwright.training.lock import RunLock
    from meshwright.training.settings import Settings


def join_launched(settings: Settings, resume: bool, console: Console, as_json: bool, verify: bool) -> NoReturn:
    """This process is a rank already: rank 0 plans, all follow."""
    import msgspec

    from meshwright.jobs.rank import make_payload, run_rank
    from meshwright.jobs.restarted import continued, decision_again, note_launchers, placed
    from meshwright.jobs.summary import show_again, show_summary
    from meshwright.measure.probe import measure_cluster
    from meshwright.runtime.gather import wait_for_all
    from meshwright.runtime.messages.exchange import from_first
    from meshwright.runtime.rank import leave
    from meshwright.runtime.ranks import joined
    from meshwright.training.folder import RunFolder
    from meshwright.training.lock import RunLock

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
    import os

    from meshwright.core.errors import InputError

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
    from meshwright.jobs.layout import lay_out_on
    from meshwright.jobs.output import say_on
    from meshwright.models.source import resolve
    from meshwright.planner.clusters import find_cluster
    from meshwright.training.pretrained import check_weights

    if not resume:
        check_weights(settings, resolve(settings.model))
    cluster = measured or find_cluster(settings.cluster, settings.hosts, say=say_on(console))
    return lay_out_on(cluster, settings, world, resume, console, lock)[1]
