"""`meshwright score`: predictions against published runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import JsonFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from meshwright.core.graph import Casting, Graph
    from meshwright.core.published import Run


def score(
    runs: Annotated[str, typer.Argument(metavar="RUNS.csv", help="Measured runs, one a row; see docs/accuracy.md.")],
    clusters: Annotated[str, typer.Option("--clusters", help="Facts of the clusters the runs name, as JSON.")],
    rows: Annotated[bool, typer.Option("--rows", help="With --json: also every run's prediction.")] = False,
    write: Annotated[
        str | None,
        typer.Option("--write", help="Put the tables and a picture into this Markdown file, between its marks."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict every run of a table and compare: errors of time and memory, out-of-memory calls, ranking within sweeps.

    Each run is predicted with constants fitted without its own table, so the errors are out of sample.
    """
    from pathlib import Path

    from meshwright.cli.output import make_console, print_json
    from meshwright.core.cluster import read_facts
    from meshwright.core.errors import InputError
    from meshwright.core.published import read_runs
    from meshwright.report.accuracy import score_table, worst_table, write_section
    from meshwright.report.score import by_table, predict
    from meshwright.report.score import score as score_of

    console = make_console(as_json)
    found = read_runs(runs)
    try:
        facts = read_facts(Path(clusters).read_bytes(), clusters)
    except OSError as error:
        raise InputError(f"{clusters}: cannot be read: {error}") from error
    predictions = predict(found, facts, _graphs(console, found))
    console.print(score_table(predictions))
    console.print(worst_table(predictions))
    for prediction in predictions:
        if prediction.failure:
            console.print(f"{prediction.run.id}: {prediction.failure}")
    if write is not None:
        command = f"meshwright score {Path(runs).name} --clusters {Path(clusters).name} --write {Path(write).name}"
        console.print(f"wrote {write_section(write, predictions, command)}")
    if as_json:
        import msgspec

        result = msgspec.to_builtins(score_of(predictions))
        result["by_source_table"] = msgspec.to_builtins(by_table(predictions))
        if rows:
            result["rows"] = msgspec.to_builtins(predictions)
        print_json(result)


def _graphs(console: Console, runs: tuple[Run, ...]) -> Callable[[str, Casting], Graph]:
    """Every model captured first, with a bar: a cold start takes most of a minute, later ones none."""
    from rich.progress import track

    from meshwright.cli.graphs import graph_of
    from meshwright.report.published import read

    readings = (read(run) for run in runs)
    models = dict.fromkeys((reading.model, reading.casting) for reading in readings)
    known = {
        key: graph_of(key[0], "bf16", key[1])
        for key in track(models, "capturing models", console=console, transient=True)
    }
    return lambda model, casting: known[model, casting]
