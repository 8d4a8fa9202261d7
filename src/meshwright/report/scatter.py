"""A picture of predicted against measured, as SVG: both axes logarithmic, one colour a table, bands at ±10 and ±25 %."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

COLOURS = ("#3366cc", "#cc6633", "#339966", "#993399", "#666666", "#b8860b")
SIZE, MARGIN = 560, 60
BANDS = ((0.25, "#f2f2f2"), (0.10, "#e2e2e2"))

Point = tuple[str, float, float]
"""Table, measured, predicted."""


def scatter(points: Sequence[Point], what: str) -> str:
    """One dot a run, at least one; on the diagonal the prediction is right."""
    values = [value for _, measured, predicted in points for value in (measured, predicted)]
    low, high = floor(log10(min(values)) * 2) / 2, ceil(log10(max(values)) * 2) / 2
    axis = _Axis(low, max(high, low + 0.5))
    tables = list(dict.fromkeys(table for table, _, _ in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE + 190} {SIZE + 20}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *(_band(axis, share, colour) for share, colour in BANDS),
        f'<line {axis.ends(0.0)} stroke="#888"/>',
        *_ticks(axis),
        *(_dot(axis, point, COLOURS[tables.index(point[0]) % len(COLOURS)]) for point in points),
        *(_label(number, table, points) for number, table in enumerate(tables)),
        f'<text x="{SIZE / 2}" y="{SIZE + 12}" text-anchor="middle">measured {escape(what)}</text>',
        f'<text transform="translate(14 {SIZE / 2}) rotate(-90)" text-anchor="middle">predicted {escape(what)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Axis:
    """From a value's logarithm to its place; the same for both directions."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def x(self, value: float) -> float:
        return MARGIN + (log10(value) - self.low) / (self.high - self.low) * (SIZE - 2 * MARGIN)

    def y(self, value: float) -> float:
        return SIZE - self.x(value)

    def ends(self, shift: float) -> str:
        first, last = 10**self.low, 10**self.high
        return (
            f'x1="{self.x(first):.1f}" y1="{self.y(first * (1 + shift)):.1f}" '
            f'x2="{self.x(last):.1f}" y2="{self.y(last * (1 + shift)):.1f}"'
        )


def _band(axis: _Axis, share: float, colour: str) -> str:
    first, last = 10**axis.low, 10**axis.high
    corners = [
        (first, first * (1 + share)),
        (last, last * (1 + share)),
        (last, last / (1 + share)),
        (first, first / (1 + share)),
    ]
    places = " ".join(f"{axis.x(x):.1f},{axis.y(y):.1f}" for x, y in corners)
    return f'<polygon points="{places}" fill="{colour}"/>'


def _ticks(axis: _Axis) -> list[str]:
    found = []
    for power in range(ceil(axis.low), floor(axis.high) + 1):
        place = axis.x(10.0**power)
        found.append(f'<text x="{place:.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{10.0**power:g}</text>')
        found.append(f'<text x="{MARGIN - 8}" y="{SIZE - place + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    return found


def _dot(axis: _Axis, point: Point, colour: str) -> str:
    table, measured, predicted = point
    title = f"{table}: measured {measured:.4g}, predicted {predicted:.4g}, {predicted / measured - 1:+.1%}"
    return (
        f'<circle cx="{axis.x(measured):.1f}" cy="{axis.y(predicted):.1f}" r="3" fill="{colour}" fill-opacity="0.7">'
        f"<title>{escape(title)}</title></circle>"
    )


def _label(number: int, table: str, points: Sequence[Point]) -> str:
    count = sum(point[0] == table for point in points)
    y = MARGIN + 18 * number
    colour = COLOURS[number % len(COLOURS)]
    return (
        f'<circle cx="{SIZE - 20}" cy="{y - 4}" r="4" fill="{colour}"/>'
        f'<text x="{SIZE - 10}" y="{y}">{escape(table)} ({count})</text>'
    )
