"""A sweep as one HTML page that needs nothing else: three pictures drawn as SVG, and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from meshwright.core.result import describe
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.sweep import Sweep, SweepPoint, as_rows, conclusion, point_words

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 220, 90, 40, 20
COLOUR, FASTEST, CHEAPEST = "#3366cc", "#339966", "#cc6633"

STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{border-bottom:1px solid #ddd;padding:.2rem .6rem;text-align:right}"
    "td:last-child,th:last-child{text-align:left}svg{max-width:100%}"
)
HEADINGS = {
    "num_hosts": "hosts",
    "num_devices": "devices",
    "global_batch": "batch",
    "step_seconds": "step",
    "tokens_per_second": "tokens/s",
    "needed_bytes": "memory per device",
    "model_flops_utilisation": "utilisation",
    "hours_per_1e9_tokens": "hours for 1e9 tokens",
    "money_per_1e9_tokens": "money for 1e9 tokens",
}

Reader = Callable[[SweepPoint], float | None]


def sweep_page(sweep: Sweep) -> str:
    title = escape(f"{sweep.model} on {sweep.cluster}")
    pictures = [
        _picture(sweep, "hours for 1e9 tokens", lambda point: point.hours, lambda hours: f"{hours:,.2f} h"),
        _picture(sweep, "step", lambda point: point.estimate.step_seconds if point.estimate else None, format_seconds),
        _picture(
            sweep,
            "memory per device",
            lambda point: point.estimate.needed_bytes if point.estimate else None,
            format_bytes,
        ),
    ]
    if sweep.price is not None:
        pictures.append(
            _picture(
                sweep, "money for 1e9 tokens", lambda point: point.money(sweep.price), lambda money: f"{money:,.2f}"
            )
        )
    said = "".join(f"<p>{escape(line)}</p>" for line in conclusion(sweep).splitlines())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{said}\n{''.join(pictures)}\n{_table(sweep)}\n</body></html>\n"
    )


def _picture(sweep: Sweep, title: str, read: Reader, show: Callable[[float], str]) -> str:
    """A bar a point, its figure above it; a gap with a word where nothing fits."""
    values = [read(point) for point in sweep.points]
    largest = max((value for value in values if value is not None), default=1.0) or 1.0
    room = (WIDTH - LEFT) / max(len(values), 1)
    marks = [
        _bar(sweep, point, value, LEFT + number * room, room, largest, show)
        for number, (point, value) in enumerate(zip(sweep.points, values, strict=True))
    ]
    base = HEIGHT - BOTTOM
    return (
        f"<h2>{escape(title)}</h2>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}" stroke="#888"/>'
        f'<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">{escape(show(largest))}</text>'
        f'<text x="{LEFT - 6}" y="{base + 4}" text-anchor="end">0</text>{"".join(marks)}</svg>\n'
    )


def _bar(
    sweep: Sweep,
    point: SweepPoint,
    value: float | None,
    left: float,
    room: float,
    largest: float,
    show: Callable[[float], str],
) -> str:
    base, middle = HEIGHT - BOTTOM, left + room / 2
    name = f'<text x="{middle:.1f}" y="{base + 16}" text-anchor="middle">{escape(point_words(point, sweep))}</text>'
    if value is None or point.plan is None:
        word = f'<text x="{middle:.1f}" y="{base - 6}" text-anchor="middle" fill="#999">nothing fits</text>'
        return f"<g><title>{escape(point.reason)}</title>{word}{name}</g>"
    height = value / largest * (base - TOP)
    colour = FASTEST if point == sweep.fastest else CHEAPEST if point == sweep.cheapest else COLOUR
    return (
        f"<g><title>{escape(describe(point.plan))}</title>"
        f'<rect x="{left + 0.15 * room:.1f}" y="{base - height:.1f}" width="{0.7 * room:.1f}" height="{height:.1f}" '
        f'fill="{colour}"/><text x="{middle:.1f}" y="{base - height - 4:.1f}" text-anchor="middle">'
        f"{escape(show(value))}</text>{name}</g>"
    )


def _table(sweep: Sweep) -> str:
    names = [name for name in HEADINGS if sweep.price is not None or name != "money_per_1e9_tokens"]
    shown: dict[str, Callable[[float], str]] = {
        "step_seconds": format_seconds,
        "needed_bytes": format_bytes,
        "model_flops_utilisation": lambda share: f"{share:.1%}",
        "tokens_per_second": lambda speed: f"{speed:,.0f}",
    }
    head = "".join(f"<th>{escape(HEADINGS[name])}</th>" for name in names)
    rows = [_row(row, names, shown) for row in as_rows(sweep)]
    return f"<table><tr>{head}<th>plan</th></tr>{''.join(rows)}</table>"


def _row(row: dict[str, object], names: Sequence[str], shown: dict[str, Callable[[float], str]]) -> str:
    cells = []
    for name in names:
        value = row[name]
        if not isinstance(value, int | float):
            cells.append("–")
        elif name in shown:
            cells.append(shown[name](value))
        else:
            cells.append(f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
    last = str(row["plan"] or row["reason"])
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in [*cells, last]) + "</tr>"
