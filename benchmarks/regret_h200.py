"""Measured regret on one GPU: microbatch x recompute x compile at a fixed global batch, the chosen plan over the best one.

    python benchmarks/regret_h200.py measure OUT.json [--only 1.3B] [--seconds 440]     # on the GPU; goes on where it ended
    python benchmarks/regret_h200.py table OUT.json                                     # anywhere: of what was measured

Rows are measured in the order in which they are predicted, the fastest first, those that are predicted not to fit last: when the
time is over, what is missing was predicted to be slow, and the table says how many rows that are. bf16, fused AdamW; steps and
their figures are those of `h200.py`. `--cpu` tries all of it on a tiny model (`--eager` without compiled rows), where the
predictions mean nothing.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h200 import CLUSTER, MODELS, TINY, Row, key, measure
from regret_choice import DEFAULT

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster
    from meshwright.core.graph import Graph
    from meshwright.core.plan import Plan

SPACES: dict[str, tuple[int, tuple[int, ...]]] = {"1.3B": (16, (4, 8, 16)), "6.7B": (8, (1, 2, 4))}
"""Global batch, and microbatches."""
TINY_SPACES: dict[str, tuple[int, tuple[int, ...]]] = {"tiny": (4, (1, 2, 4))}


def rows_of(is_tiny: bool, only: str | None, compiled: tuple[bool, ...]) -> list[Row]:
    models, spaces = (TINY, TINY_SPACES) if is_tiny else (MODELS, SPACES)
    return [
        {
            "name": name, "model": models[name], "recompute": recompute, "compile": is_compiled, "microbatch": microbatch,
            "global_batch": global_batch,
        }
        for name, (global_batch, microbatches) in spaces.items()
        if only in (None, name)
        for is_compiled, recompute, microbatch in product(compiled, ("none", "full"), microbatches)
    ]  # fmt: skip


def predicted(rows: list[Row], cluster: Cluster, choose: str) -> list[Row]:
    """The rows of each model with prediction and whether it is the chosen one, the promising ones first."""
    from meshwright.capturing.capture import capture_source
    from meshwright.cost.estimate import estimate
    from meshwright.models.source import resolve

    found: list[Row] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        graph = capture_source(resolve(model), "bf16")
        own = [dict(row) for row in rows if row["model"] == model]
        for row in own:
            made = estimate(graph, plan_of(row, graph, cluster), cluster)
            row |= {"predicted_seconds": made.step_seconds, "predicted_bytes": made.peak_bytes, "fits": made.fits}
        own.sort(key=lambda row: (not row["fits"], row["predicted_seconds"]))
        chosen = own[0] if choose == "estimate" else searched(own[0], graph, cluster)
        if key(chosen) not in map(key, own):
            made = estimate(graph, plan_of(chosen, graph, cluster), cluster)
            own.insert(0, {**chosen, "predicted_seconds": made.step_seconds, "fits": made.fits, "outside": True})
        for row in own:
            row["chosen"] = key(row) == key(chosen)
        found += own
    return found


def searched(row: Row, graph: Graph, cluster: Cluster) -> Row:
    """What the search chooses for the row's model and global batch, as a row."""
    from meshwright.core.request import PlanRequest
    from meshwright.searching.search import search

    plan = search(graph, cluster, PlanRequest(global_batch=row["global_batch"], precision="bf16"), world=1).plan
    modes = {rule.mode for rule in plan.recompute} or {"none"}
    if modes - {"none", "full"} or plan.offload.what != "none":
        raise SystemExit(
            f"the search chose recompute {plan.recompute_words}, which a row cannot say: extend `h200.plan_of`"
        )
    return {**row, "microbatch": plan.microbatch, "recompute": modes.pop(), "compile": plan.compile}


def plan_of(row: Row, graph: Graph, cluster: Cluster) -> Plan:
    from meshwright.core.request import PlanRequest
    from meshwright.rules.plain_plan import plain_plan

    request = PlanRequest(
        microbatch=row["microbatch"], global_batch=row["global_batch"], recompute=row["recompute"],
        compile=row["compile"], precision="bf16",
    )  # fmt: skip
    return plain_plan(request, graph, 1, cluster.hash)


def show(rows: list[Row]) -> None:
    """A line a model, then a line a row."""
    print(
        "| model | global batch | plans | chosen | chosen / best | best | its step |\n|---|---:|---:|---|---:|---|---:|"
    )
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        print(f"| {' | '.join(summary(name, own))} |")
    print("\n| model | plan | step, predicted | measured | error |\n|---|---|---:|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(figures(row))} |")


def summary(name: str, rows: list[Row]) -> list[str]:
    ran = [row for row in rows if row.get("measured_seconds")]
    chosen = next(row for row in rows if row.get("chosen"))
    if not ran:
        return [name, str(rows[0]["global_batch"]), f"0 of {len(rows)}", words(chosen), "", "", ""]
    best = min(ran, key=lambda row: row["measured_seconds"])
    regret = (
        f"{chosen['measured_seconds'] / best['measured_seconds']:.3f}" if chosen.get("measured_seconds") else "not run"
    )
    missing = sum("row_seconds" not in row for row in rows)
    count = str(len(rows)) + (f", {missing} not measured" if missing else "")
    same = "the same" if best is chosen else words(best)
    return [
        name,
        str(best["global_batch"]),
        count,
        words(chosen),
        regret,
        same,
        f"{1e3 * best['measured_seconds']:.0f} ms",
    ]


def words(row: Row) -> str:
    mode = "compiled" if row["compile"] else "eager"
    return f"microbatch {row['microbatch']}, recompute {row['recompute']}, {mode}"


def figures(row: Row) -> list[str]:
    measured, guess = row.get("measured_seconds"), row["predicted_seconds"]
    shown = f"{1e3 * measured:.0f} ms" if measured else row.get("error", "not measured")
    error = f"{guess / measured - 1:+.1%}" if measured else ""
    fits = "" if row.get("fits", True) else " (does not fit)"
    return [
        row["name"],
        words(row) + (", chosen" if row["chosen"] else ""),
        f"{1e3 * guess:.0f} ms{fits}",
        shown,
        error,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("file", type=Path, metavar="OUT.json")
    parser.add_argument("--only", choices=SPACES, help="one model alone")
    parser.add_argument("--seconds", type=float, default=440, help="begin no row after this time")
    parser.add_argument("--cluster", default=CLUSTER, help="a name or file, for the predictions")
    parser.add_argument(
        "--choose", choices=("search", "estimate"), default=DEFAULT, help="by the search, or by each estimate"
    )
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script itself")
    parser.add_argument("--eager", action="store_true", help="no compiled rows")
    options = parser.parse_args()
    from meshwright.core.cluster import Cluster, load_cluster

    cluster = load_cluster(options.cluster) if Path(options.cluster).exists() else Cluster.named(options.cluster)
    rows = predicted(
        rows_of(options.cpu, options.only, (False,) if options.eager else (False, True)), cluster, options.choose
    )
    if options.what == "measure":
        measure(rows, options.file, "cpu" if options.cpu else "cuda", options.seconds)
    done = {key(row): row for row in json.loads(options.file.read_text())["rows"]} if options.file.exists() else {}
    show([measured_beside(row, done.get(key(row), {})) for row in rows])


def measured_beside(row: Row, done: dict[str, Any]) -> Row:
    """What was measured, with what is predicted now."""
    return {**done, **row}


if __name__ == "__main__":
    main()
