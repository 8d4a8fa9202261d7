"""What comes after a run: its RunSummary, predicted against measured, and where everything is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from meshwright.core.codec import Value
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.run.trace import Trace
from meshwright.jobs.output import print_json
from meshwright.planner.decision import Decision
from meshwright.report.tables import comparison_table
from meshwright.training.folder import RunFolder
from meshwright.training.kept import latest, step_of
from meshwright.training.manifest import DamagedError
from meshwright.training.metrics import dropped_tokens, last_values
from meshwright.training.places import places_of
from meshwright.training.position import read_progress
from meshwright.training.run_id import check_same_run, read_id
from meshwright.training.settings import Settings


class RunSummary(Value, kw_only=True):
    """The end of a training run: its loss and figures, predicted and measured, and where its files are."""

    loss: float
    """Of the last step."""
    step_seconds: float | None
    """Measured; None where the run recorded no step."""
    tokens_per_second: float | None
    predicted_step_seconds: float
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    dropped_tokens: int
    """Choices of experts that had no room."""
    dropped_share: float
    validation_loss: float | None
    num_steps: int
    stopped: str | None
    """Why it ended before its last step."""
    interrupted: bool = False
    """By Ctrl-C or a signal, with a checkpoint."""
    restarts: int
    checkpoint: str
    run_folder: str


def show_summary(
    settings: Settings, decision: Decision, summary: dict[str, Any], console: Console, as_json: bool
) -> RunSummary:
    """Predicted against measured, and where everything is. summary: what the ranks told."""
    folder = RunFolder(settings.folder)
    trace = Trace.load(folder.trace) if folder.trace.exists() else None
    dropped, routed = dropped_tokens(folder.metrics)
    found = RunSummary(
        **{"restarts": 0, **summary},
        step_seconds=trace.step_seconds if trace else None,
        tokens_per_second=trace.tokens_per_second if trace else None,
        predicted_step_seconds=decision.estimate.step_seconds,
        predicted_peak_bytes=decision.estimate.peak_bytes,
        measured_peak_bytes=trace.peak_bytes if trace else None,
        dropped_tokens=dropped,
        dropped_share=dropped / routed if routed else 0.0,
        run_folder=str(folder.path),
    )
    if trace is not None:
        console.print(comparison_table(decision.estimate, trace))
    for line in _lines(found, routed):
        console.print(line)
    if as_json:
        print_json(found)
    return found


def _lines(found: RunSummary, routed: int) -> Iterator[str]:
    ended = f"stopped after {found.num_steps} steps: {found.stopped}" if found.stopped else "done"
    yield f"{ended}; loss {found.loss:.4f}; everything is in {found.run_folder}"
    if routed:
        yield f"experts had no room for {found.dropped_tokens} of {routed} choices ({found.dropped_share:.1%})"
    if found.stopped:
        yield "its checkpoint is whole: the same command with --resume goes on from it"


def show_again(settings: Settings, console: Console, as_json: bool) -> RunSummary | None:
    """A run that has all its steps is shown again, not run again."""
    found = _done_before(settings)
    if found is None:
        return None
    console.print(f"{settings.folder} has all its {settings.steps} steps already: give more with --steps")
    return show_summary(settings, *found, console, as_json)


def _done_before(settings: Settings) -> tuple[Decision, dict[str, Any]] | None:
    """Of a run that has all its steps. Files that are gone are made by running it, without a step."""
    folder = RunFolder(settings.folder)
    newest = latest(places_of(folder))
    needed = (folder.trace, folder.metrics, folder.plan, folder.estimate)
    if newest is None or step_of(newest) < settings.steps or not all(path.exists() for path in needed):
        return None
    values = last_values(folder.metrics)
    if "loss" not in values:
        return None
    try:
        check_same_run(newest, read_progress(newest).run, read_id(folder.path))
    except DamagedError:
        return None  # the ranks look closer, and go on from the one before it
    summary = {
        "loss": values["loss"],
        "validation_loss": values.get("validation_loss"),
        "num_steps": step_of(newest),
        "stopped": None,
        "checkpoint": str(newest),
    }
    return Decision(Plan.load(folder.plan), Estimate.load(folder.estimate), None), summary
