"""One screen about a search: the plan in words, its step and memory by part, and why each runner-up lost.

At a width of 100 it takes at most 40 lines: time and memory stand side by side, a runner-up has one line and is told by what
it does otherwise than the chosen plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.result import SearchResult
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.differences import difference_words
from meshwright.report.plan_words import plan_in_words
from meshwright.report.words import MEMORY_WORDS, TIME_WORDS, model_size
from meshwright.rules.limits import not_yet

SHOWN_RUNNERS_UP = 5
SCREEN_WIDTH = 100
LEAST_PLAN_WIDTH = 30
BAR_WIDTH = 10
EIGHTHS = " ▏▎▍▌▋▊▉█"

Row = tuple[str, str, float]
"""Words, the figure as shown, its share of the whole."""


def plan_view(result: SearchResult, cluster: Cluster, graph: Graph | None = None) -> Group:
    """All there is to say about a search, on one screen."""
    return Group(
        chosen_view(result.plan, result.estimate, cluster, graph),
        Text(),
        *_runners_up(result),
        *([Text(result.remark, style="yellow")] if result.remark else []),
        Text(_search_words(result), style="dim"),
    )


def chosen_view(plan: Plan, estimate: Estimate, cluster: Cluster, graph: Graph | None = None) -> Group:
    """One plan in words, with its step and memory by part."""
    return Group(
        Text(_title(plan, cluster, graph), style="bold"),
        *(Text(f"  {sentence}") for sentence in plan_in_words(plan, cluster, graph)),
        *(Text(f"  {words}", style="yellow") for words in _reservations(plan, cluster)),
        Text(),
        Text(_speed(estimate), style="bold"),
        *([Text(estimate.origin_words, style=_origin_style(estimate))] if estimate.rates else []),
        Text(_memory(estimate), style="bold" if estimate.fits else "bold red"),
        _side_by_side(_time_rows(estimate), _memory_rows(estimate)),
        *([Text(f"memory per host: {format_bytes(estimate.host_bytes)}")] if estimate.host_bytes else []),
    )


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of a share of the whole, in eighths of a character."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def runners_up_table(result: SearchResult, shown: int = SHOWN_RUNNERS_UP) -> Table:
    """What each does otherwise, and the one reason it lost; one line each."""
    others = result.runners_up[:shown]
    longest = max((len(other.reason) for other in others), default=0)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    room = max(LEAST_PLAN_WIDTH, SCREEN_WIDTH - longest - 6)  # the reason is shown whole where it can be
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=room)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for number, other in enumerate(others, start=2):
        table.add_row(f"{number}", Text(difference_words(other.plan, result.plan)), Text(other.reason))
    return table


def _runners_up(result: SearchResult) -> Iterator[RenderableType]:
    if not result.runners_up:
        return
    left = len(result.runners_up) - SHOWN_RUNNERS_UP
    more = f" ({left} more with --json)" if left > 0 else ""
    yield Text(f"runners-up, by what they do otherwise{more}", style="bold")
    yield runners_up_table(result)


def _title(plan: Plan, cluster: Cluster, graph: Graph | None) -> str:
    size = f", {model_size(graph)}" if graph else ""
    hosts = f"{cluster.num_hosts} × " if cluster.num_hosts > 1 else ""
    return (
        f"{plan.model or 'model'}{size}, on {hosts}{cluster.devices_per_host} × {cluster.device.name} ({cluster.name})"
    )


def _reservations(plan: Plan, cluster: Cluster) -> Iterator[str]:
    if plan.world < cluster.num_devices:
        yield f"uses {plan.world} of {cluster.num_devices} devices: more would be slower, or do not divide the batch"
    if parts := not_yet(plan):
        yield f"costed, but this version cannot run {', '.join(parts)} yet"


def _speed(estimate: Estimate) -> str:
    assumed = " (assumed)" if estimate.rates == "assumed" else ""
    return (
        f"{format_seconds(estimate.step_seconds)} per step{assumed} · {estimate.tokens_per_second:,.0f} tokens/s{assumed} · "
        f"{estimate.model_flops_utilisation:.1%} of the devices' peak (model-flops utilisation)"
    )


def _origin_style(estimate: Estimate) -> str:
    return "yellow" if estimate.rates == "assumed" else "dim"


def _memory(estimate: Estimate) -> str:
    needed, budget = estimate.needed_bytes, estimate.budget_bytes
    words = f"{format_bytes(needed)} of {format_bytes(budget)} per device ({needed / budget:.0%})"
    if not estimate.fits:
        words += f": {format_bytes(needed - budget)} too much"
    return words + (f"; fullest: rank {estimate.worst_rank}, {estimate.worst_moment}" if estimate.worst_moment else "")


def _time_rows(estimate: Estimate) -> list[Row]:
    parts = msgspec.structs.asdict(estimate.time_seconds)
    return [
        (words, format_seconds(parts[part]), parts[part] / estimate.step_seconds)
        for part, words in TIME_WORDS.items()
        if parts[part]
    ]


def _memory_rows(estimate: Estimate) -> list[Row]:
    parts = msgspec.structs.asdict(estimate.memory_bytes)
    sizes = [(words, parts[part]) for part, words in MEMORY_WORDS.items() if parts[part]]
    if estimate.reserved_bytes > estimate.peak_bytes:
        sizes.append(("allocator's slack", estimate.reserved_bytes - estimate.peak_bytes))
    if estimate.context_bytes:
        sizes.append(("held by the driver", estimate.context_bytes))
    return [(words, format_bytes(size), size / estimate.budget_bytes) for words, size in sizes]


def _side_by_side(left: list[Row], right: list[Row]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(2):
        table.add_column(min_width=24, no_wrap=True)
        table.add_column(justify="right", min_width=10, no_wrap=True)
        table.add_column(justify="right", min_width=4, no_wrap=True)
        table.add_column(width=BAR_WIDTH, style="cyan")
    empty: Row = ("", "", 0.0)
    for number in range(max(len(left), len(right))):
        cells = []
        for rows in (left, right):
            words, shown, share = rows[number] if number < len(rows) else empty
            cells += [f"  {words}", shown, f"{share:.0%}" if words else "", bar(share)]
        table.add_row(*cells)
    return table


def _search_words(result: SearchResult) -> str:
    costed = f", {result.num_costed:,} costed" if 0 < result.num_costed < result.num_candidates else ""
    words = f"{result.num_candidates:,} candidates{costed} in {format_seconds(result.search_seconds)} by search {result.method}"
    return f"{words}; {result.claim.words}"
