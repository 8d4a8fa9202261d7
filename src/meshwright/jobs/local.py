"""A run on local ranks: started here, waited for, and started again after a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.planner.decision import Decision
    from meshwright.training.lock import RunLock
    from meshwright.training.settings import Settings


def run_ranks(
    settings: Settings, resume: bool, console: Console, as_json: bool, quiet: bool = False, verify: bool = False
) -> tuple[dict[str, Any] | None, Decision]:
    """Plan here, then start the ranks and wait for them. No summary where a resumed run had nothing left to do."""
    from meshwright.jobs.summary import show_again
    from meshwright.runtime.launch import stoppable
    from meshwright.training.lock import RunLock

    if resume and (done := show_again(settings, console, as_json)):
        _clear(settings.folder)
        return None, done
    with stoppable(), RunLock(settings.folder) as lock:
        return _run(settings, resume, console, as_json, quiet, verify, lock)


def _clear(folder: str) -> None:
    """What a launcher left that was killed at the very end of its run. A folder that another holds, or nobody may write, stays."""
    from contextlib import suppress
    from pathlib import Path
    from tempfile import gettempdir

    from meshwright.core.errors import InputError
    from meshwright.runtime.temporary import clear_abandoned
    from meshwright.training.folder import RunFolder
    from meshwright.training.lock import RunLock

    clear_abandoned(Path(gettempdir()))
    with suppress(InputError), RunLock(folder):
        RunFolder(folder).clear_left()


def _run(
    settings: Settings, resume: bool, console: Console, as_json: bool, quiet: bool, verify: bool, lock: RunLock
) -> tuple[dict[str, Any], Decision]:
    """With the folder held."""
    from meshwright.core.cluster import Cluster
    from meshwright.core.errors import OutOfMemoryError
    from meshwright.jobs.layout import lay_out
    from meshwright.jobs.out_of_memory import with_ways_out
    from meshwright.jobs.rank import make_payload
    from meshwright.jobs.restarting import Restarting
    from meshwright.runtime.launch import Interrupted
    from meshwright.runtime.restarts import Attempt, launch_with_restarts
    from meshwright.training.folder import RunFolder

    folder, decision = lay_out(settings, resume, console, lock)
    payload = make_payload(folder, console, as_json, resume=resume, verify=verify, quiet=quiet)
    restarting = Restarting(settings, decision, console)
    first = Attempt(payload, decision.plan.world)
    try:
        summary = launch_with_restarts(
            "meshwright.jobs.rank:train_rank",
            first,
            settings.faults.restarts,
            restarting.next_attempt,
            settings.timeout,
        )
    except OutOfMemoryError as error:
        raise with_ways_out(error, settings, restarting.decision, Cluster.load(RunFolder(folder).cluster)) from None
    except Interrupted as stop:
        if stop.result is None:
            raise
        return {**stop.result, "interrupted": True, "restarts": restarting.num_restarts}, restarting.decision
    return {**summary, "interrupted": False, "restarts": restarting.num_restarts}, restarting.decision
