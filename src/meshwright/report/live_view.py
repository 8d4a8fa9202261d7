"""A running job on one screen: loss, speed, memory by rank, and the rank the others wait for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.core.live import RankState
from meshwright.core.result import describe
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.run import Run

SHOWN_RANKS = 16
RECENT_STEPS = 20
TREND = "▁▂▃▄▅▆▇█"
LEAST_DIFFERENCE = 0.05
"""Of a step: ranks whose waiting differs by less are equally fast."""


def live_view(run: Run, ranks: Sequence[RankState], num_steps: int, now: float) -> Group:
    """One screen. now: seconds since 1970, to say how old it is."""
    lines = [line for line in run.metrics if "loss" in line]
    parts: list[RenderableType] = [Text(f"{run.name}: {describe(run.plan)}", style="bold")]
    if not lines:
        return Group(*parts, Text("no step is done yet"))
    last, recent = lines[-1], lines[-RECENT_STEPS:]
    speed = statistics.median(line["tokens_per_second"] for line in recent)
    seconds = statistics.median(line["seconds"] for line in recent)
    left = max(0, num_steps - 1 - last["step"]) * seconds
    parts += [
        Text(f"step {last['step'] + 1} of {num_steps}, about {format_seconds(left)} to go"),
        Text(f"loss {last['loss']:.4f}  {trend([line['loss'] for line in lines])}"),
        Text(
            f"{speed:,.0f} tokens/s, {format_seconds(seconds)} per step "
            f"(promised {format_seconds(run.estimate.step_seconds)})"
        ),
    ]
    if ranks:
        parts += [rank_table(ranks, run, now), Text(slowest_words(ranks))]
    return Group(*parts)


def rank_table(ranks: Sequence[RankState], run: Run, now: float) -> Table:
    """The fullest ranks first, where there are many."""
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "step", "memory now", "peak", "of the promise", "waits", "said"):
        table.add_column(name, justify="right")
    fullest = sorted(ranks, key=lambda one: -(one.peak_bytes or one.memory_bytes))[:SHOWN_RANKS]
    for one in sorted(fullest, key=lambda one: one.rank):
        table.add_row(
            str(one.rank),
            str(one.step + 1),
            format_bytes(one.memory_bytes),
            format_bytes(one.peak_bytes) if one.peak_bytes is not None else "",
            f"{one.peak_bytes / run.estimate.peak_bytes:.0%}" if one.peak_bytes is not None else "",
            f"{one.waiting_share:.0%}" if one.waiting_share is not None else "",
            f"{format_seconds(max(0.0, now - one.at))} ago",
        )
    return table


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
