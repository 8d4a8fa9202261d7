"""The searches side by side: what each chooses for six models, what it expects of it, and how long it takes.

    python benchmarks/searches.py [--models gpt-39e9,bert] [--methods joint,profile] [--write] [--json]

Step: the estimate of the chosen plan. Search: seconds of the search alone, the model's graph known. Plans: how many were
estimated in full. A method that refuses a model says so in its cell. `--write` puts the table into docs/performance.md. Rows that
are not run keep what the file says.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.request import PlanRequest
from meshwright.core.result import describe
from meshwright.core.units import format_seconds
from meshwright.planner.graphs import both_castings
from meshwright.planner.plan import plain_precision
from meshwright.searching.methods.profile import replication_loss
from meshwright.searching.problem import Problem
from meshwright.searching.search import METHODS, search

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- searches: begin -->", "<!-- searches: end -->"
HEADER = ("model", "search", "step", "search time", "plans", "choice")


@dataclass(frozen=True)
class Case:
    model: str
    cluster: str
    hosts: int
    global_batch: int


CASES = {
    "gpt-39e9": Case("gpt:layers=48,hidden=8192,heads=64,seq=1024,vocab=51200", "v100-16g-p3", 8, 1024),
    "gpt-1.3e9": Case("gpt:layers=24,hidden=2048,heads=16,seq=2048,vocab=51200", "a100-80g-selene", 1, 512),
    "llama-8b": Case(f"hf:{ROOT}/tests/assets/llama-8b.json", "h100-80g-mosaic", 1, 64),
    "wide-resnet": Case("resnet:depth=50,width=2,image=224,classes=1024,channels=320", "v100-16g-p3", 1, 256),
    "moe-64": Case("moe:layers=12,hidden=1024,heads=16,seq=1024,vocab=50304,experts=64", "a100-80g-selene", 2, 256),
    "bert-large": Case("bert:layers=24,hidden=1024,heads=16,seq=512", "a100-80g-selene", 1, 256),
}


@dataclass(frozen=True)
class Row:
    model: str
    method: str
    step_seconds: float | None
    search_seconds: float | None
    num_plans: int
    words: str
    """The choice, or why there is none."""

    @property
    def cells(self) -> tuple[str, ...]:
        step, took = (format_seconds(s) if s is not None else "–" for s in (self.step_seconds, self.search_seconds))
        return (self.model, self.method, step, took, str(self.num_plans or "–"), self.words)


def run(name: str, method: str) -> Row:
    case = CASES[name]
    cluster = Cluster.named(case.cluster, case.hosts)
    precision = plain_precision(cluster)
    graph, other = both_castings(case.model, precision)
    request = PlanRequest(global_batch=case.global_batch, precision=precision)
    try:
        found = search(graph, cluster, request, other_casting=other, method=method)
    except (PlanError, InfeasibleError) as error:
        return Row(name, method, None, None, 0, _first_words(str(error).replace(f" of '{graph.model}'", "")))
    num_plans = 1 + len(found.runners_up)
    return Row(name, method, found.estimate.step_seconds, found.search_seconds, num_plans, describe(found.plan))


def loss(name: str) -> float:
    """What uniform replication costs the slowest stage, by the layer profile alone."""
    case = CASES[name]
    cluster = Cluster.named(case.cluster, case.hosts)
    precision = plain_precision(cluster)
    graph, other = both_castings(case.model, precision)
    request = PlanRequest(global_batch=case.global_batch, precision=precision)
    return replication_loss(Problem(graph, cluster, request, other_casting=other))


def _first_words(message: str) -> str:
    return "refused: " + re.split(r"[:.] ", message, maxsplit=1)[0].replace("|", "/")


def table(rows: list[Row]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|---|---|---:|---:|---:|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row.cells) + " |" for row in rows)])


def merged(fresh: list[Row], before: str) -> str:
    """The table with the rows just made, and of the others those that were there."""
    lines = {(cells[0], cells[1]): line for line in before.splitlines() if len(cells := _cells(line)) == len(HEADER)}
    for row in fresh:
        lines[row.model, row.method] = "| " + " | ".join(row.cells) + " |"
    head = table([]).splitlines()
    body = [lines[model, method] for model in CASES for method in METHODS if (model, method) in lines]
    return "\n".join([*head, *body])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def write(rows: list[Row]) -> None:
    text = FILE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    made = "Made by `python benchmarks/searches.py --write`."
    FILE.write_text(f"{before}{BEGIN}\n{made}\n\n{merged(rows, old)}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--loss", action="store_true", help="also what one replication for all stages costs, by model")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    rows, losses = [], {}
    for name in options.models.split(","):
        for method in options.methods.split(","):
            rows.append(run(name, method))
            print("  ".join(rows[-1].cells), flush=True)
            if options.write:
                write(rows[-1:])
        if options.loss:
            losses[name] = loss(name)
            print(f"{name}: one replication for all stages makes the slowest {losses[name]:.1%} slower", flush=True)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "replication_loss": losses}))


if __name__ == "__main__":
    main()
