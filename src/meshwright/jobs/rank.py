"""What each rank of `meshwright train` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from meshwright.runtime.ranks import Rank


def make_payload(
    folder: Path, console: Console, as_json: bool, *, resume: bool, verify: bool, quiet: bool = False
) -> dict[str, Any]:
    """What a rank is told; all else is in the run folder."""
    from meshwright.training.run_id import read_id

    return {
        "folder": str(folder), "run": read_id(folder), "resume": resume, "verify": verify, "as_json": as_json, "quiet": quiet,
        "terminal": console.is_terminal,
    }  # fmt: skip


def train_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """What each rank that we started runs."""
    from meshwright.runtime.ranks import joined
    from meshwright.training.folder import RunFolder
    from meshwright.training.settings import Settings

    folder = RunFolder(payload["folder"])
    settings = Settings.load(folder.settings)
    with joined(settings.device, settings.backend, settings.timeout, folder.hang) as rank:
        return run_rank(payload, rank)


def run_rank(payload: dict[str, Any], rank: Rank) -> dict[str, Any]:
    from meshwright.core.plan import Plan
    from meshwright.jobs.output import make_run_console
    from meshwright.measure.record import StepRecorder
    from meshwright.training.folder import RunFolder
    from meshwright.training.job import Job
    from meshwright.training.run import run
    from meshwright.training.run_id import check_still_ours
    from meshwright.training.settings import Settings

    folder, run_id = RunFolder(payload["folder"]), payload["run"]
    check_still_ours(folder.path, run_id)
    settings, plan = Settings.load(folder.settings), Plan.load(folder.plan)
    job = Job(settings, plan, folder, payload["resume"], payload["verify"], run_id)
    console = make_run_console(payload["as_json"], quiet=payload["quiet"], force_terminal=payload["terminal"] or None)
    outcome = run(job, rank, StepRecorder(), console)
    return {
        "loss": outcome.loss,
        "validation_loss": outcome.validation_loss,
        "num_steps": outcome.num_steps,
        "stopped": outcome.stopped,
        "checkpoint": str(outcome.checkpoint),
    }
