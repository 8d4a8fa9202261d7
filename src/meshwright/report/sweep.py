"""A sweep: the best plan at each point, and what it takes in time, memory and money.

money per 1e9 tokens = price per device-hour · devices rented · seconds per 1e9 tokens / 3600              -> SweepPoint.money
devices rented are all of the cluster's, used or not
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.core.codec import Value
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.result import describe
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.plan_view import bar

TOKENS = 1e9
HOUR = 3600.0
PLOT_WIDTH = 40


class SweepPoint(Value, kw_only=True):
    """The best plan at one cluster size and batch size, or why there is none."""

    num_hosts: int
    num_devices: int
    """Rented: all that the cluster has."""
    global_batch: int
    plan: Plan | None = None
    """The best; None where nothing fits."""
    estimate: Estimate | None = None
    reason: str = ""
    """Why there is no plan."""
    search_seconds: float = 0.0

    @property
    def hours(self) -> float | None:
        """For 1e9 tokens."""
        return TOKENS / self.estimate.tokens_per_second / HOUR if self.estimate else None

    def money(self, price: float | None) -> float | None:
        """For 1e9 tokens, at a price per device-hour."""
        return None if self.hours is None or price is None else price * self.num_devices * self.hours


class Sweep(Value, kw_only=True):
    """The best plans at several cluster sizes or batch sizes, with what they cost.

        found = mw.sweep(model, "a100-80g-selene", hosts=[1, 2, 4], price=2.0)
        print(found.fastest.num_hosts, found.cheapest.money(found.price))

    points    one a size: its plan and estimate, or the reason why nothing fits
    price     money per device-hour, where it was given
    """

    model: str
    cluster: str
    points: tuple[SweepPoint, ...]
    price: float | None = None
    """Per device-hour."""

    @property
    def feasible(self) -> tuple[SweepPoint, ...]:
        """The points that have a plan."""
        return tuple(point for point in self.points if point.estimate is not None)

    @property
    def fastest(self) -> SweepPoint | None:
        """The most tokens per second; among equals the smaller cluster."""
        return min(self.feasible, key=lambda point: (point.hours, point.num_devices), default=None)

    @property
    def cheapest(self) -> SweepPoint | None:
        """The fewest device-hours for 1e9 tokens, whatever a device-hour costs; among equals the faster."""
        return min(self.feasible, key=lambda point: (point.money(1.0), point.hours), default=None)


def sweep_view(sweep: Sweep) -> Group:
    """Table, plots, and what to rent."""
    return Group(sweep_table(sweep), Text(), *sweep_plots(sweep), Text(conclusion(sweep), style="bold"))


def sweep_table(sweep: Sweep) -> Table:
    figures = "hours" if sweep.price is None else "hours and money"
    table = Table(
        title=f"{sweep.model} on {sweep.cluster}",
        title_justify="left",
        caption=f"memory: of the worst device; peak: model-flops utilisation; {figures}: for 1e9 tokens",
        caption_justify="left",
    )
    names = ["hosts", "devices", "batch", "step", "tokens/s", "memory", "peak", "hours"]
    names += ["money"] if sweep.price is not None else []
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("plan")
    for point in sweep.points:
        first = [str(point.num_hosts), str(point.num_devices), f"{point.global_batch:,}"]
        table.add_row(*first, *map(Text, _figures(point, sweep.price)), style=None if point.estimate else "dim")
    return table


def _figures(point: SweepPoint, price: float | None) -> list[str]:
    width = 6 if price is not None else 5
    if point.estimate is None or point.plan is None or point.hours is None:
        return [*["–"] * width, point.reason]
    found = point.estimate
    words = [
        format_seconds(found.step_seconds),
        f"{found.tokens_per_second:,.0f}",
        format_bytes(found.needed_bytes),
        f"{found.model_flops_utilisation:.1%}",
        f"{point.hours:,.2f}",
    ]
    if price is not None:
        words.append(f"{point.money(price):,.2f}")
    return [*words, describe(point.plan)]


def sweep_plots(sweep: Sweep) -> list[Table]:
    """A bar a point: seconds, memory, and money where there is a price."""
    plots = [
        _plot(sweep, "seconds per step", lambda point: _of(point.estimate, "step_seconds"), format_seconds),
        _plot(sweep, "memory per device", lambda point: _of(point.estimate, "needed_bytes"), format_bytes),
    ]
    if sweep.price is not None:
        plots.append(
            _plot(sweep, "money per 1e9 tokens", lambda point: point.money(sweep.price), lambda money: f"{money:,.2f}")
        )
    return plots


def _of(estimate: Estimate | None, name: str) -> float | None:
    return None if estimate is None else float(getattr(estimate, name))


def _plot(sweep: Sweep, title: str, read: Callable[[SweepPoint], float | None], show: Callable[[float], str]) -> Table:
    values = [read(point) for point in sweep.points]
    largest = max((value for value in values if value is not None), default=1.0) or 1.0
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", min_width=22)
    table.add_column(min_width=PLOT_WIDTH, style="cyan")
    table.add_column(justify="right")
    table.add_row(Text(title, style="bold"), "", "")
    for point, value in zip(sweep.points, values, strict=True):
        shown = ("nothing fits", "") if value is None else (bar(value / largest, PLOT_WIDTH), show(value))
        table.add_row(point_words(point, sweep), *shown)
    return table


def point_words(point: SweepPoint, sweep: Sweep) -> str:
    """What tells a point from the others."""
    if len({other.num_hosts for other in sweep.points}) > 1:
        return f"{point.num_hosts} host{'' if point.num_hosts == 1 else 's'}"
    return f"batch {point.global_batch:,}"


def conclusion(sweep: Sweep) -> str:
    fastest, cheapest = sweep.fastest, sweep.cheapest
    if fastest is None or cheapest is None:
        return "nothing fits at any point: `meshwright plan` with one of them names the ways out"
    fast = f"fastest: {point_words(fastest, sweep)}, {fastest.hours:,.2f} hours for 1e9 tokens{_price(fastest, sweep)}"
    cheap = f"cheapest: {point_words(cheapest, sweep)}, {cheapest.hours:,.2f} hours{_price(cheapest, sweep)}"
    return f"{fast}\n{cheap}"


def _price(point: SweepPoint, sweep: Sweep) -> str:
    money = point.money(sweep.price)
    if money is None:
        return f", {(point.hours or 0) * point.num_devices:,.1f} device-hours"
    return f", {money:,.2f}"


COLUMNS = (
    "num_hosts", "num_devices", "global_batch", "step_seconds", "tokens_per_second", "needed_bytes", "model_flops_utilisation",
    "hours_per_1e9_tokens", "money_per_1e9_tokens", "plan", "reason",
)  # fmt: skip


def as_rows(sweep: Sweep) -> list[dict[str, object]]:
    """A row a point, for CSV and JSON; None where nothing fits or there is no price."""
    figures = ("step_seconds", "tokens_per_second", "needed_bytes", "model_flops_utilisation")
    return [
        {
            "num_hosts": point.num_hosts,
            "num_devices": point.num_devices,
            "global_batch": point.global_batch,
            **{name: getattr(point.estimate, name) if point.estimate else None for name in figures},
            "hours_per_1e9_tokens": point.hours,
            "money_per_1e9_tokens": point.money(sweep.price),
            "plan": describe(point.plan) if point.plan else None,
            "reason": point.reason,
        }
        for point in sweep.points
    ]


def as_csv(rows: Sequence[dict[str, object]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
