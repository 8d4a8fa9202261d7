"""One run or several as a page that needs nothing else: text and tables written here, pictures drawn by the page's own script.

The page forbids itself the network (its Content-Security-Policy), so that it opens from disk as it does from a server. One that
is served while its run goes on (`live`) may ask for itself again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from statistics import fmean

import msgspec

from meshwright.core.result import describe
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.comparison import comparison_sections
from meshwright.report.differences import difference_words
from meshwright.report.fullest import fullest_words
from meshwright.report.live_view import RANK_HEADS, Live, progress_words, rank_rows, silent_words, slowest_words
from meshwright.report.page_data import page_data
from meshwright.report.plan_words import plan_in_words
from meshwright.report.run import Run, median, percentile
from meshwright.report.verdict import verdict

SCRIPTS = ("frame.js", "colours.js", "memory.js", "gantt.js", "plots.js", "findings.js", "cluster.js", "page.js")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
SHOWN_RUNNERS_UP = 40


def page(runs: Sequence[Run], title: str, live: Live | None = None, said: Sequence[str] = ()) -> str:
    """The whole page. live: it is served while its run goes on, and asks for itself. said: about all runs together."""
    connect = "; connect-src 'self'" if live else ""
    asks = f' data-live="{live.every:g}"' if live else ""
    data = msgspec.json.encode(page_data(runs)).decode().replace("<", "\\u003c")
    scripts = "\n".join(_asset(name) for name in SCRIPTS)
    return (
        f'<!doctype html>\n<html lang="en"{asks}><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}{connect}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head>\n<body>"
        f'<header><h1>{escape(title)}</h1><button type="button" class="theme">light or dark</button></header>\n'
        f'<main>{"".join(_body(runs, live, said))}</main>\n<div id="tip" role="status"></div>\n'
        f'<script type="application/json" id="data">{data}</script>\n<script>{scripts}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("meshwright.report").joinpath("assets", name).read_text(encoding="utf-8")


def _body(runs: Sequence[Run], live: Live | None, said: Sequence[str]) -> Iterator[str]:
    if said:
        yield f'<div class="verdict">{"".join(f"<p>{escape(sentence)}</p>" for sentence in said)}</div>'
    if len(runs) > 1:
        yield f'<section class="beside"><h2>Side by side</h2>{_beside(runs)}<div id="beside"></div></section>'
        tabs = (
            f'<button type="button" aria-selected="{str(not n).lower()}">{escape(r.name)}</button>'
            for n, r in enumerate(runs)
        )
        yield f'<nav class="runs">{"".join(tabs)}</nav>'

    def heading(run: Run) -> str:
        return f"<h2>{escape(run.name)}</h2>" if len(runs) > 1 else ""

    for number, run in enumerate(runs):
        inside = "".join((heading(run), *_sections(run, number, live)))
        yield f'<section class="run" id="run-{number}"{" hidden" if number else ""}>{inside}</section>\n'


def _sections(run: Run, number: int, live: Live | None) -> Iterator[str]:
    def place(name: str) -> str:
        return f'<div id="run-{number}-{name}"></div>'

    trace = run.worst
    measured = trace is not None
    bad = "" if run.estimate.fits else " bad"
    yield f'<div class="verdict{bad}">{"".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(run))}</div>'
    if live:
        yield f"<h2>Now</h2>{_now(run, live)}"
    if run.remark:
        yield f'<p class="faint">{escape(run.remark)}</p>'
    yield f"<h2>The plan</h2>{_sentences(run)}{place('cluster')}"
    if run.forecast is not None or measured:
        yield f"<h2>The schedule</h2>{_schedule_words(run)}{place('gantt')}"
    if run.forecast is not None or (trace is not None and trace.memory_over_time):
        yield f"<h2>Memory over the step</h2>{_faint(fullest_words(run))}{place('memory')}"
    yield f"<h2>Where the time goes</h2>{place('time')}{_promise_table(run)}"
    if run.step_seconds:
        yield f"<h2>Step time</h2>{_step_words(run)}{place('steps')}"
    yield f"<h2>Communication by axis</h2>{_communication_words(run)}{place('communication')}"
    if trace is not None and trace.timeline:
        yield f"<h3>Seconds of the sampled step, exposed and hidden</h3>{place('overlap')}"
        if len(run.traces) > 1:
            yield f"<h3>How long each rank is busy</h3>{place('ranks')}"
    if run.metrics:
        yield f"<h2>Loss and learning rate</h2>{place('loss')}{place('rate')}"
        yield f"<h3>{run.unit.capitalize()} per second</h3>{place('speed')}"
    if run.result is not None:
        yield f"<h2>Candidates considered</h2>{_candidates(run)}"
    yield f"<h2>To make it again</h2>{_again(run)}"


def _now(run: Run, live: Live) -> str:
    words = f"<p>{escape(progress_words(run, live.num_steps))}</p>"
    if not live.ranks:
        return words
    said = (slowest_words(live.ranks), silent_words(live.ranks, run, live.now))
    below = "".join(f"<p>{escape(sentence)}</p>" for sentence in said if sentence)
    return f"{words}{_table(RANK_HEADS, rank_rows(live.ranks, run, live.now))}{below}"


def _faint(words: str) -> str:
    return f'<p class="faint">{escape(words)}</p>' if words else ""


def _sentences(run: Run) -> str:
    if run.cluster is None:
        return f"<p>{escape(describe(run.plan))}</p>"
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in plan_in_words(run.plan, run.cluster))
    cluster = run.cluster
    where = f"{cluster.num_hosts} × {cluster.devices_per_host} × {cluster.device.name} ({cluster.name})"
    return f'<p class="faint">{escape(run.plan.model or "a model")} on {escape(where)}</p><ul>{items}</ul>'


def _schedule_words(run: Run) -> str:
    words = []
    if run.forecast is not None and run.forecast.num_microbatches < run.plan.num_microbatches:
        words.append(
            f"predicted with {run.forecast.num_microbatches} of {run.plan.num_microbatches} microbatches: between its beginning "
            "and its end the step repeats itself"
        )
    if run.traces:
        words.append("measured: one sampled step, which the recorder makes slower than others")
    return _faint("; ".join(words))


def _promise_table(run: Run) -> str:
    trace = run.worst
    if trace is None:
        return ""
    lines = [line for section in comparison_sections(run.estimate, trace, run.unit) for line in section]
    strong = [number for number, line in enumerate(lines) if line.is_total]
    note = _faint("the last of its repeats") if run.repeats else ""
    return note + _table(("", "predicted", "measured", "error"), [line.cells for line in lines], strong=strong)


def _step_words(run: Run) -> str:
    values = run.step_seconds
    figures = (
        ("mean", fmean(values)), ("median", percentile(values, 0.5)), ("95 % are below", percentile(values, 0.95)),
        ("fastest", min(values)), ("slowest", max(values)),
    )  # fmt: skip
    return f"<p>{escape(' · '.join(f'{name} {format_seconds(value)}' for name, value in figures))}</p>"


def _communication_words(run: Run) -> str:
    calls = run.worst.collectives if run.worst is not None and run.worst.collectives else run.estimate.collectives
    if not calls:
        return "<p>Nothing is communicated.</p>"
    total = format_bytes(sum(call.total_bytes for call in calls))
    return f"<p>{total} per step and rank, counted at the input of each call.</p>"


def _candidates(run: Run) -> str:
    result = run.result
    assert result is not None
    rows = [
        (
            "chosen: " + describe(result.plan),
            format_seconds(result.estimate.step_seconds),
            format_bytes(result.estimate.peak_bytes),
            "",
        )
    ]
    rows += [
        (
            difference_words(other.plan, result.plan),
            format_seconds(other.step_seconds),
            format_bytes(other.peak_bytes),
            other.reason,
        )
        for other in sorted(result.runners_up[:SHOWN_RUNNERS_UP], key=lambda other: other.step_seconds)
    ]
    searched = (
        f"{result.num_candidates:,} candidates in {format_seconds(result.search_seconds)} by search {result.method}; "
        f"{result.claim.words}"
    )
    left = len(result.runners_up) - SHOWN_RUNNERS_UP
    more = f"; {left} more are left out here" if left > 0 else ""
    head = ("what it does otherwise", "step", "peak", "why it lost")
    return f"<p>{escape(searched + more)}</p>{_table(head, rows, words=(0, 3))}"


def _again(run: Run) -> str:
    parts = [f"<details><summary>the plan</summary><pre>{escape(run.plan.to_toml())}</pre></details>"]
    if run.settings:
        parts.insert(0, f"<details open><summary>settings.toml</summary><pre>{escape(run.settings)}</pre></details>")
    if run.worst is not None and run.worst.environment:
        parts.append(_table(("", ""), [(name, value) for name, value in run.worst.environment], words=(0, 1)))
    return "".join(parts)


def _beside(runs: Sequence[Run]) -> str:
    """Runs in a table, the fastest first."""
    rows = []
    for run in sorted(runs, key=lambda one: median(one.step_seconds) or one.estimate.step_seconds):
        trace, values = run.worst, run.step_seconds
        peak = trace.peak_bytes if trace and trace.peak_bytes else None
        sent = sum(call.total_bytes for call in (trace.collectives if trace else run.estimate.collectives))
        rows.append(
            (
                run.name,
                format_seconds(percentile(values, 0.5)) if values else "",
                format_seconds(percentile(values, 0.95)) if values else "",
                format_seconds(run.estimate.step_seconds),
                format_bytes(peak) if peak else "",
                format_bytes(run.estimate.peak_bytes),
                format_bytes(sent),
                "" if run.loss is None else f"{run.loss:.4f}",
                describe(run.plan),
            )
        )
    head = ("run", "step, median", "95 %", "predicted", "peak", "predicted", "bytes per step", "loss", "plan")
    return _table(head, rows, words=(0, 8))


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,), strong: Sequence[int] = ()
) -> str:
    """words: columns of text. strong: rows that stand out. A cell that begins with spaces is part of what stands above it."""

    def cell(name: str, place: int, value: str) -> str:
        kinds = [kind for kind, holds in (("words", place in words), ("part", value.startswith("  "))) if holds]
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{name}{kind}>{escape(value.strip())}</{name}>"

    def cells(name: str, values: Sequence[str]) -> str:
        return "".join(cell(name, place, value) for place, value in enumerate(values))

    marks = dict.fromkeys(strong, ' class="strong"')
    body = "".join(f"<tr{marks.get(number, '')}>{cells('td', row)}</tr>" for number, row in enumerate(rows))
    top = f"<tr>{cells('th', head)}</tr>" if any(head) else ""
    return f'<div class="scroll"><table>{top}{body}</table></div>'
