"""A comparison of plans as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.contest import LOSS_TOLERANCE, loss_difference
from meshwright.report.run import Run, median, percentile

HEADS = ("mean", "median", "95 % below", "predicted", "epoch", "peak", "predicted", "bytes a step", "loss differs")


def contest_table(runs: Sequence[Run], epoch_steps: int | None) -> Table:
    """The fastest first."""
    table = Table(title="plans on the same data, per step and rank", title_justify="left")
    table.add_column("plan")
    for name in HEADS:
        table.add_column(name, justify="right")
    for run in sorted(runs, key=lambda run: median(run.step_seconds) or float("inf")):
        table.add_row(run.name, *_cells(run, runs[0], epoch_steps))
    return table


def _cells(run: Run, reference: Run, epoch_steps: int | None) -> tuple[str, ...]:
    trace, seconds = run.worst, run.step_seconds
    assert trace is not None
    mean = sum(seconds) / len(seconds)
    differs = loss_difference(run, reference)
    warning = " !" if differs is not None and differs > LOSS_TOLERANCE else ""
    return (
        format_seconds(mean),
        format_seconds(percentile(seconds, 0.5)),
        format_seconds(percentile(seconds, 0.95)),
        format_seconds(run.estimate.step_seconds),
        format_seconds(mean * epoch_steps) if epoch_steps else "",
        format_bytes(trace.peak_bytes) if trace.peak_bytes is not None else "not sampled",
        format_bytes(run.estimate.peak_bytes),
        format_bytes(sum(call.total_bytes for call in trace.collectives)) if trace.peak_bytes is not None else "",
        "" if differs is None else f"{differs:.2g}{warning}",
    )
