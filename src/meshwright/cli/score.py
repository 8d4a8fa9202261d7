"""`meshwright score`: predictions against published runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.progress import track
from typer import Argument, Option

from meshwright.cli.options import JsonFlag
from meshwright.core.cluster import read_facts
from meshwright.core.errors import MeshwrightError
from meshwright.core.files.given_file import read_given
from meshwright.core.graph import Casting, Graph, Precision
from meshwright.interop.published import read_runs
from meshwright.jobs.output import make_console, print_json
from meshwright.planner import graphs
from meshwright.report.accuracy import score_table, worst_table, write_section
from meshwright.report.score import GraphOf, Prediction, by_table, predict
from meshwright.report.score import score as score_of


def score(
    runs: Annotated[str, Argument(metavar="RUNS.csv", help="Measured runs, one a row; see docs/accuracy.md.")],
    clusters: Annotated[str, Option(help="Facts of the clusters the runs name, as JSON.")],
    rows: Annotated[bool, Option("--rows", help="With --json: also every run's prediction.")] = False,
    write: Annotated[
        str | None, Option(help="Put the tables and a picture into this Markdown file, between its marks.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict every run of a table and compare: errors of time and memory, out-of-memory calls, ranking within sweeps.

    Each run is predicted with constants fitted without its own table, so the errors are out of sample.
    """
    console = make_console(as_json)
    facts = read_facts(read_given(clusters), clusters)
    bar = track(read_runs(runs), "predicting runs", console=console, transient=True)  # captures take most of a minute
    predictions = predict(bar, facts, _captures())
    console.print(score_table(predictions))
    console.print(worst_table(predictions))
    for prediction in predictions:
        if prediction.failure:
            console.print(f"{prediction.run.id}: {prediction.failure}")
    if write is not None:
        command = f"meshwright score {Path(runs).name} --clusters {Path(clusters).name} --write {Path(write).name}"
        console.print(f"wrote {write_section(write, predictions, command)}")
    if as_json:
        print_json(_as_builtins(predictions, rows))


def _captures() -> GraphOf:
    """Every model captured once. One that cannot be says so for each of its rows."""

    @cache
    def attempt(model: str, precision: Precision, casting: Casting) -> Graph | MeshwrightError:
        try:
            return graphs.graph_of(model, precision, casting)
        except MeshwrightError as error:
            return error

    def graph(model: str, precision: Precision, casting: Casting) -> Graph:
        found = attempt(model, precision, casting)
        if isinstance(found, MeshwrightError):
            raise found
        return found

    return graph


def _as_builtins(predictions: list[Prediction], rows: bool) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.to_builtins(score_of(predictions))
    result["by_source_table"] = msgspec.to_builtins(by_table(predictions))
    if rows:
        result["rows"] = msgspec.to_builtins(predictions)
    return result
