"""Fit the constants that no data sheet gives to published runs, once without each table.

    python benchmarks/fit_published.py RUNS.csv CLUSTERS.json            # prints the fits
    python benchmarks/fit_published.py RUNS.csv CLUSTERS.json --write    # and puts them into core/families.json

Few constants a family of devices, none a row (FREE below); all others keep the origin they have. For every table T the
constants are fitted to the runs of all other tables: `meshwright score` predicts the runs of T with those, so its errors are
out of sample. The fit named `all` is for runs of no known table, and for planning.

Measured by the mean of |log(predicted / measured)| over each table's best nine tenths, tables weighted alike: a few rows of
these tables are off by reasons nobody wrote down, and they must not bend the rest. Coordinate by coordinate, halving steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

from meshwright.core import constants
from meshwright.core.cluster import Facts, read_facts
from meshwright.core.errors import MeshwrightError
from meshwright.interop.published import Run, read_runs
from meshwright.planner.graphs import graph_of
from meshwright.report.published import read
from meshwright.report.score import facts_of, predict

FREE: dict[str, dict[str, tuple[float, float, float]]] = {
    "A100": {"matmul_share": (0.55, 0.95, 0.06)},
    "H100": {"matmul_share": (0.40, 0.95, 0.06)},
}
"""Family → constant → least, most, first step."""
ROUNDS = 4
MOST_ROWS = 36
"""Of one table, evenly chosen: the fit needs no more."""
BEST_SHARE = 0.9
FILE = Path(constants.__file__).with_name("families.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs")
    parser.add_argument("clusters")
    parser.add_argument("--write", action="store_true", help="put the fits into core/families.json")
    options = parser.parse_args()
    try:
        facts = read_facts(Path(options.clusters).read_bytes(), options.clusters)
        runs = timed_runs(options.runs, facts)
    except MeshwrightError as error:
        sys.exit(str(error))
    file = json.loads(FILE.read_text(encoding="utf-8"))
    fits = all_fits(runs, facts, file)
    print(json.dumps(fits, indent=1))
    if options.write:
        file["fits"] = fits
        FILE.write_text(as_text(file), encoding="utf-8")
        print(f"wrote {FILE}")


def timed_runs(path: str, facts: dict[str, Facts]) -> list[Run]:
    """Rows with a time that can be read; one that names an unknown cluster is refused."""
    runs = [run for run in read_runs(path) if isinstance(run, Run) and run.step_seconds]
    for run in runs:
        facts_of(run, facts)
    return runs


def all_fits(runs: list[Run], facts: dict[str, Facts], file: dict[str, Any]) -> dict[str, Any]:
    """Fits by the table they leave out, and `all`."""
    constants._families = lambda: file  # type: ignore[assignment]  # what is tried must be what is read
    found: dict[str, Any] = {}
    began = time.perf_counter()
    for without in [*sorted({run.source_table for run in runs}), "all"]:
        found[without] = {}
        for family in FREE:
            mine = [run for run in runs if family.casefold() in facts[run.cluster].device.casefold()]
            chosen = thinned([run for run in mine if run.source_table != without])
            if chosen:
                found[without][family] = fit(family, chosen, facts, file)
                print(f"{time.perf_counter() - began:.0f} s: {without}, {family}: {found[without][family]}", flush=True)
    return found


def thinned(runs: list[Run]) -> list[Run]:
    tables: dict[str, list[Run]] = {}
    for run in runs:
        tables.setdefault(run.source_table, []).append(run)
    return [run for rows in tables.values() for run in rows[:: -(-len(rows) // MOST_ROWS)]]


def fit(family: str, runs: list[Run], facts: dict[str, Facts], file: dict[str, Any]) -> dict[str, Any]:
    """The constants of one family that suit these runs best."""
    origin = f"fit: {', '.join(sorted({run.source_table for run in runs}))}"
    readings = [read(run, facts[run.cluster]) for run in runs]
    keys = dict.fromkeys((reading.model, reading.precision, reading.casting) for reading in readings)
    graphs = {key: graph_of(*key) for key in keys}

    def cost(values: dict[str, float]) -> float:
        file["fits"] = {"all": {family: {name: [round(value, 3), origin] for name, value in values.items()}}}
        return distance(runs, facts, lambda *key: graphs[key])

    start = {name: (file["families"][family].get(name) or file["common"][name])[0] for name in FREE[family]}
    best = descend(cost, start, FREE[family])
    return {name: [round(value, 3), origin] for name, value in best.items()}


def distance(runs: list[Run], facts: dict[str, Facts], graphs: Callable[..., Any]) -> float:
    tables: dict[str, list[float]] = {}
    for prediction in predict(runs, facts, graphs):
        ratio = (prediction.step_seconds or 1e-9) / (prediction.run.step_seconds or 1.0)
        tables.setdefault(prediction.run.source_table, []).append(abs(log(ratio)))
    weights = {table: min(1.0, len(errors) / 10) ** 0.5 for table, errors in tables.items()}  # three rows tell less
    return sum(weights[table] * best_mean(errors) for table, errors in tables.items()) / sum(weights.values())


def best_mean(errors: list[float]) -> float:
    kept = sorted(errors)[: max(1, int(BEST_SHARE * len(errors)))]
    return sum(kept) / len(kept)


def descend(
    cost: Callable[[dict[str, float]], float], start: dict[str, float], free: dict[str, tuple[float, float, float]]
) -> dict[str, float]:
    """Coordinate descent: a step that does not help is halved."""
    values, best = start, cost(start)
    steps = {name: step for name, (_, _, step) in free.items()}
    for _ in range(ROUNDS):
        for name, (least, most, _) in free.items():
            for move in (steps[name], -steps[name]):
                tried = {**values, name: min(most, max(least, values[name] + move))}
                found = cost(tried)
                if found < best - 1e-5:
                    values, best = tried, found
                    break
            else:
                steps[name] /= 2
    return values


def as_text(file: dict[str, Any]) -> str:
    """families.json as it is kept: one constant, one family, one fit a line."""

    def block(entries: dict[str, Any]) -> str:
        return ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())

    head = f'  "note": {json.dumps(file["note"])},\n  "default": {json.dumps(file["default"])}'
    parts = [f'  "{name}": {{\n{block(file[name])}\n  }}' for name in ("common", "families", "fits")]
    return "{\n" + ",\n".join([head, *parts]) + "\n}\n"


if __name__ == "__main__":
    main()
