"""The score as text: for the terminal, and as the part of docs/accuracy.md that stands between its marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from meshwright.core.errors import InputError
from meshwright.interop.published import Unreadable
from meshwright.report.scatter import scatter
from meshwright.report.score import Prediction, Score, by_table, score

BEGIN, END = "<!-- published runs: begin -->", "<!-- published runs: end -->"
WORST_SHOWN = 12
COLUMNS = (
    ("table", ""), ("runs", "num_rows"), ("time, median", "step_time_median_error"), ("time, p90", "step_time_p90_error"),
    ("memory, median", "memory_median_error"), ("memory, p90", "memory_p90_error"), ("OOM recall", "oom_recall"),
    ("false alarms", "oom_false_alarm_rate"), ("rank correlation", "sweep_spearman"), ("regret", "sweep_regret_median"),
)  # fmt: skip


def score_table(predictions: Sequence[Prediction]) -> Table:
    table = Table(title="predicted against published runs, out of sample", title_justify="left")
    for words, field in COLUMNS:
        table.add_column(words, justify="right" if field else "left")
    for cells in _rows(predictions):
        table.add_row(*map(escape, cells), style="bold" if cells[0] == "all" else None)
    return table


def worst_table(predictions: Sequence[Prediction]) -> Table:
    """The runs that are furthest off, and those that could not be predicted."""
    table = Table(title="furthest off", title_justify="left")
    for words in ("run", "model", "plan", "measured", "predicted", "error"):
        table.add_column(words, justify="left" if words in ("run", "model", "plan") else "right")
    for prediction in worst(predictions):
        table.add_row(*map(escape, _run_cells(prediction)))
    return table


def worst(predictions: Sequence[Prediction]) -> list[Prediction]:
    timed = [p for p in predictions if p.time_error is not None]
    return sorted(timed, key=lambda p: -abs(p.time_error or 0.0))[:WORST_SHOWN]


def _rows(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    scores = {**by_table(predictions), "all": score(predictions)}
    return [(name, *(_cell(found, field) for _, field in COLUMNS[1:])) for name, found in scores.items()]


def _cell(found: Score, field: str) -> str:
    value = getattr(found, field)
    if value is None:
        return "–"
    if field == "num_rows":
        return str(value)
    return f"{value:.3f}" if field.startswith("sweep") else f"{value:.1%}"


def _run_cells(prediction: Prediction) -> tuple[str, ...]:
    run = prediction.run
    predicted = f"{prediction.step_seconds:.3g} s" if prediction.step_seconds else prediction.failure
    told = (f"{run.step_seconds:.3g} s", predicted, f"{prediction.time_error:+.0%}")
    if isinstance(run, Unreadable):
        return (run.id, "–", "–", *told)
    plan = f"tp {run.tp} · pp {run.pp} · dp {run.dp}, ZeRO {run.zero}, microbatch {run.micro_batch}, {run.recompute} recompute"
    model = f"{run.layers} × {run.hidden}, {run.heads} heads, {run.seq} tokens"
    return (run.id, model, f"{run.num_gpus} GPUs: {plan}", *told)


def write_section(path: str | Path, predictions: Sequence[Prediction], command: str) -> Path:
    """Replace what stands between the marks, and draw the picture beside the file where there is a run to show."""
    target = Path(path)
    text = target.read_text(encoding="utf-8") if target.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{target}: has no lines '{BEGIN}' and '{END}': add them where the score should stand")
    picture = target.with_name("accuracy-published.svg")
    points = [
        (p.run.source_table, p.run.step_seconds, p.step_seconds)
        for p in predictions
        if p.run.step_seconds and p.step_seconds
    ]
    if points:
        picture.write_text(scatter(points, "step time, s"), encoding="utf-8")
    section = _section(predictions, command, picture.name if points else None)
    target.write_text(f"{before}{BEGIN}\n{section}{END}{after}", encoding="utf-8")
    return target


def _section(predictions: Sequence[Prediction], command: str, picture: str | None) -> str:
    image = [f"![predicted against measured step time of published runs]({picture})", ""] if picture else []
    header = [words for words, _ in COLUMNS]
    lines = [
        f"Made by `{command}`.", "",
        _line(header), _line(["---", *["---:"] * (len(header) - 1)]), *(_line(cells) for cells in _rows(predictions)), "",
        *image,
        "Furthest off:", "",
        _line(["run", "model", "plan", "measured", "predicted", "error"]), _line(["---"] * 3 + ["---:"] * 3),
        *(_line(_run_cells(prediction)) for prediction in worst(predictions)), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    """A row of a Markdown table; a message may hold line breaks and bars."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in cells)} |"
