"""A running job on one screen: loss, speed, memory by rank, and the rank the others wait for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.core.result import describe
from meshwright.core.run.fault import RankState
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.run import Run, median, speed_words

RANK_HEADS = ("rank", "step", "memory now", "peak", "of the promise", "waits", "said")
SHOWN_RANKS = 16
RECENT_STEPS = 20
TREND = "▁▂▃▄▅▆▇█"
LEAST_DIFFERENCE = 0.05
"""Of a step: ranks whose waiting differs by less are equally fast."""
LEAST_SILENCE, SILENT_STEPS = 30.0, 20
"""Seconds, and steps, after which a run that says nothing is remarked upon."""


@dataclass(frozen=True)
class Live:
    """What a page of a running job says beside its Run."""

    every: float
    """Seconds after which it asks for itself again."""
    ranks: tuple[RankState, ...]
    num_steps: int
    now: float
    """Seconds since 1970."""


def live_view(run: Run, ranks: Sequence[RankState], num_steps: int, now: float) -> Group:
    """One screen. now: seconds since 1970, to say how old it is."""
    lines = [line for line in run.metrics if "loss" in line]
    parts: list[RenderableType] = [Text(f"{run.name}: {describe(run.plan)}", style="bold")]
    if not lines:
        return Group(*parts, Text(progress_words(run, num_steps)))
    recent = lines[-RECENT_STEPS:]
    speed = statistics.median(line["tokens_per_second"] for line in recent)
    seconds = statistics.median(line["seconds"] for line in recent)
    parts += [
        Text(progress_words(run, num_steps)),
        Text(f"loss {lines[-1]['loss']:.4f}  {trend([line['loss'] for line in lines])}"),
        Text(
            f"{speed_words(speed)} {run.unit}/s, {format_seconds(seconds)} per step "
            f"(promised {format_seconds(run.estimate.step_seconds)})"
        ),
    ]
    if ranks:
        parts += [rank_table(ranks, run, now), Text(slowest_words(ranks))]
    if silence := silent_words(ranks, run, now):
        parts.append(Text(silence, style="yellow"))
    return Group(*parts)


def progress_words(run: Run, num_steps: int) -> str:
    """How far it is, and how long the rest takes at the speed of its last steps."""
    lines = [line for line in run.metrics if "loss" in line]
    if not lines:
        return "no step is done yet"
    seconds = statistics.median(line["seconds"] for line in lines[-RECENT_STEPS:])
    left = max(0, num_steps - 1 - lines[-1]["step"]) * seconds
    return f"step {lines[-1]['step'] + 1} of {num_steps}, about {format_seconds(left)} to go"


def rank_table(ranks: Sequence[RankState], run: Run, now: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in RANK_HEADS:
        table.add_column(name, justify="right")
    for row in rank_rows(ranks, run, now):
        table.add_row(*row)
    return table


def rank_rows(ranks: Sequence[RankState], run: Run, now: float) -> list[tuple[str, ...]]:
    """By rank; the fullest alone, where there are many."""
    fullest = sorted(ranks, key=lambda one: -(one.peak_bytes or one.memory_bytes))[:SHOWN_RANKS]
    return [
        (
            str(one.rank),
            str(one.step + 1),
            format_bytes(one.memory_bytes),
            format_bytes(one.peak_bytes) if one.peak_bytes is not None else "",
            f"{one.peak_bytes / run.estimate.peak_bytes:.0%}" if one.peak_bytes is not None else "",
            f"{one.waiting_share:.0%}" if one.waiting_share is not None else "",
            f"{format_seconds(max(0.0, now - one.at))} ago",
        )
        for one in sorted(fullest, key=lambda one: one.rank)
    ]


def silent_words(ranks: Sequence[RankState], run: Run, now: float) -> str:
    """Said where no rank has done a step for far longer than one takes: a run that was killed leaves no other sign."""
    if not ranks:
        return ""
    silent = now - max(one.at for one in ranks)
    if silent < max(LEAST_SILENCE, SILENT_STEPS * (median(run.step_seconds) or 0.0)):
        return ""
    return (
        f"no rank has ended a step for {format_seconds(silent)}: it validates, saves or hangs, or the run was stopped; "
        "`meshwright train --resume RUN_FOLDER` goes on from its last checkpoint"
    )


def slowest_words(ranks: Sequence[RankState]) -> str:
    """The rank that waits least, where the others wait far more."""
    known = [one for one in ranks if one.waiting_share is not None]
    if len(known) < 2:
        return "which rank is slowest is known once a step was sampled" if not known else ""
    shares = {one.rank: one.waiting_share or 0.0 for one in known}
    slowest = min(shares, key=lambda rank: shares[rank])
    others = statistics.median(share for rank, share in shares.items() if rank != slowest)
    if others - shares[slowest] < LEAST_DIFFERENCE:
        return "no rank keeps the others waiting"
    return f"slowest: rank {slowest}, which waits {shares[slowest]:.0%} of a step where the others wait {others:.0%}"


def trend(values: Sequence[float], width: int = 40) -> str:
    """A line of bars: the mean of each of `width` stretches."""
    count = min(width, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)]
    means = [statistics.fmean(values[begin:end]) for begin, end in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(TREND[min(len(TREND) - 1, int((value - low) / span * len(TREND)))] for value in means)
