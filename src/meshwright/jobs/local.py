"""A run on local ranks: started here, waited for, and started again after a fault."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from rich.console import Console

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InputError, OutOfMemoryError
from meshwright.jobs.layout import lay_out
from meshwright.jobs.out_of_memory import with_ways_out
from meshwright.jobs.rank import make_payload
from meshwright.jobs.restarting import Restarting
from meshwright.jobs.summary import RunSummary, show_again, show_summary
from meshwright.planner.decision import Decision
from meshwright.runtime.launch import Interrupted, stoppable
from meshwright.runtime.restarts import Attempt, launch_with_restarts
from meshwright.runtime.temporary import clear_abandoned
from meshwright.training.folder import RunFolder
from meshwright.training.lock import RunLock
from meshwright.training.settings import Settings


def run_ranks(
    settings: Settings, resume: bool, console: Console, as_json: bool, quiet: bool = False, verify: bool = False
) -> RunSummary:
    """Plan here, then start the ranks and wait for them. A resumed run that has nothing left to do is shown as it ended."""
    if resume and (done := show_again(settings, console, as_json)):
        _clear(settings.folder)
        return done
    with stoppable(), RunLock(settings.folder) as lock:
        decision, summary = _run(settings, resume, console, as_json, quiet, verify, lock)
    return show_summary(settings, decision, summary, console, as_json)


def _clear(folder: str) -> None:
    """What a launcher left that was killed at the very end of its run. A folder that another holds, or nobody may write, stays."""
    clear_abandoned(Path(gettempdir()))
    with suppress(InputError), RunLock(folder):
        RunFolder(folder).clear_left()


def _run(
    settings: Settings, resume: bool, console: Console, as_json: bool, quiet: bool, verify: bool, lock: RunLock
) -> tuple[Decision, dict[str, Any]]:
    """With the folder held: the plan it ended with, and what the ranks told."""
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
        summary = {**stop.result, "interrupted": True}
    return restarting.decision, {**summary, "restarts": restarting.num_restarts}
