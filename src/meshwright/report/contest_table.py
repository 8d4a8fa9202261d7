"""A comparison of plans as tables for the terminal: time, and memory by category."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meshwright.core.units import GIB, KIB, MIB, format_bytes, format_seconds
from meshwright.report.contest import LOSS_TOLERANCE, loss_difference
from meshwright.report.histogram import bars, counted, shared_edges
from meshwright.report.run import Run, median, percentile
from meshwright.report.words import MEMORY_WORDS

TIME_HEADS = (
    "mean",
    "median",
    "95 % below",
    "histogram",
    "predicted",
    "error",
    "epoch",
    "bytes a step",
    "loss differs",
)


def contest_tables(runs: Sequence[Run], epoch_steps: int | None) -> tuple[Table, ...]:
    """The fastest first."""
    ordered = sorted(runs, key=lambda run: median(run.step_seconds) or float("inf"))
    timed = [run for run in ordered if run.step_seconds]
    return time_table(timed, runs[0], epoch_steps), *([memory_table(ordered)] if any(map(_sampled, runs)) else [])


def time_table(runs: Sequence[Run], reference: Run, epoch_steps: int | None) -> Table:
    edges = shared_edges(runs)
    between = f"; histogram: {format_seconds(edges[0])} to {format_seconds(edges[-1])} and slower" if edges else ""
    table = _table(f"plans on the same data, per step and rank{between}", TIME_HEADS)
    for run in runs:
        table.add_row(run.name, *_time_cells(run, reference, edges, epoch_steps))
    return table


def memory_table(runs: Sequence[Run]) -> Table:
    """Of each run's fullest rank, at its peak; one unit for all, so that columns stay narrow."""
    parts = [part for part in MEMORY_WORDS if any(_part(run, part) for run in runs)]
    unit, factor = _unit(max(run.estimate.peak_bytes for run in runs))
    heads = ("peak", "predicted", "error", *(MEMORY_WORDS[part] for part in parts))
    table = _table(f"memory of the fullest rank at its peak, in {unit}", heads)
    for run in runs:
        sizes = (_part(run, part) / factor for part in parts)
        table.add_row(run.name, *_memory_cells(run, factor), *(f"{size:,.2f}" if size else "" for size in sizes))
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("plan")
    for name in heads:
        table.add_column(name, justify="left" if name == "histogram" else "right", no_wrap=name == "histogram")
    return table


def _time_cells(run: Run, reference: Run, edges: Sequence[float], epoch_steps: int | None) -> tuple[str, ...]:
    trace, seconds = run.worst, run.step_seconds
    assert trace is not None
    mean, middle, promised = sum(seconds) / len(seconds), percentile(seconds, 0.5), run.estimate.step_seconds
    differs = loss_difference(run, reference)
    warning = " !" if differs is not None and differs > LOSS_TOLERANCE else ""
    return (
        format_seconds(mean),
        format_seconds(middle),
        format_seconds(percentile(seconds, 0.95)),
        bars(counted(seconds, edges)),
        format_seconds(promised),
        f"{promised / middle - 1:+.0%}",
        format_seconds(mean * epoch_steps) if epoch_steps else "",
        format_bytes(sum(call.total_bytes for call in trace.collectives)) if trace.peak_bytes is not None else "",
        "" if differs is None else f"{differs:.2g}{warning}",
    )


def _memory_cells(run: Run, factor: int) -> tuple[str, str, str]:
    trace, predicted = run.worst, run.estimate.peak_bytes
    promised = f"{predicted / factor:,.2f}"
    if trace is None or trace.peak_bytes is None:
        return "", promised, ""
    return f"{trace.peak_bytes / factor:,.2f}", promised, f"{predicted / trace.peak_bytes - 1:+.1%}"


def _unit(num_bytes: int) -> tuple[str, int]:
    return next((pair for pair in (("GiB", GIB), ("MiB", MIB)) if num_bytes >= pair[1]), ("KiB", KIB))


def _sampled(run: Run) -> bool:
    return run.worst is not None and run.worst.memory_bytes is not None


def _part(run: Run, part: str) -> int:
    return int(getattr(run.worst.memory_bytes, part)) if run.worst and run.worst.memory_bytes else 0
