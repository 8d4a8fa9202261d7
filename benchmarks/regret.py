"""Measured regret: the time of the plan that is chosen, over the time of the best of all plans that two ranks can run.

    python benchmarks/regret.py [--only WORKLOAD] [--link NAME] [--quick] [--again] [--write] [--json]

Four workloads x three links (`regret_space.py`): two ranks, pinned to a core and one thread each, on this host's loopback and on
two local hosts whose link is held to 1 Gbit/s and 200 Mbit/s (`hosts.py`; needs root). Every legal plan of a stated space is run
(`regret_ranks.py`) and predicted on the cluster that the ranks probed just before.

    regret = measured time of the chosen plan / measured time of the best plan            beside it, always DDP and always ZeRO 3
    error  = predicted / measured - 1, the median of its size over all plans; rank: Spearman's correlation of the two orders

Each cell's figures and each link's cluster are kept in runs/regret, and a later run goes on with the cells that are missing;
`--again` begins anew.
`--show` prints every plan of the cells; `--write` puts the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hosts import two_hosts, why_not
from regret_choice import CHOOSERS, DEFAULT
from regret_ranks import typical
from regret_space import LINKS, NUM_RANKS, WORKLOADS
from turns import add_to_path

Found = dict[str, Any]

FOLDER = Path("runs", "regret")
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- regret: begin -->", "<!-- regret: end -->"
ANSWERS = {"chosen": "chosen", "ddp": "always DDP", "zero3": "always ZeRO 3"}
ROUNDS, QUICK_ROUNDS = 8, 3


def measure(links: list[str], workloads: list[str], options: argparse.Namespace) -> None:
    """Every cell that has no file yet, link by link."""
    for link in links:
        files = {name: str(file_of(name, link).resolve()) for name in workloads}
        missing = {name: file for name, file in files.items() if options.again or not Path(file).exists()}
        if not missing:
            continue
        reason = why_not() if LINKS[link] is not None else ""
        if reason:
            print(f"{link}: {reason}", file=sys.stderr)
            continue
        cluster_file = FOLDER / f"cluster-{slug(link)}.json"
        payload = {
            "link": link,
            "files": missing,
            "cluster_file": str(cluster_file.resolve()),
            "is_probed": cluster_file.exists() and not options.again,
            "choose": options.choose,
            "quick": options.quick,
            "rounds": QUICK_ROUNDS if options.quick else ROUNDS,
        }
        run(link, payload)


def run(link: str, payload: Found) -> None:
    from meshwright.runtime.launch import launch

    rate = LINKS[link]
    if rate is None:
        launch("regret_ranks:run_rank", payload, NUM_RANKS)
        return
    with two_hosts(rate) as hosts:
        hosts.launch("regret_ranks:run_rank", payload)


def file_of(workload: str, link: str) -> Path:
    return FOLDER / f"{workload}-{slug(link)}.json"


def slug(link: str) -> str:
    return link.replace(" ", "-").replace("/", "-").lower()


# --- Judging ---------------------------------------------------------------------------------------------------------


def judged(cell: Found) -> Found:
    """A cell's regrets and how well its plans were predicted."""
    rows = cell["rows"]
    finals = {number: typical(row["turns"]) for number, row in enumerate(rows) if row["turns"]}
    best = min(finals, key=lambda number: finals[number])
    ran = [row for row in rows if row["first_seconds"] is not None]
    measured = [seconds_of(row) for row in ran]
    predicted = [row["predicted_seconds"] for row in ran]
    return {
        "workload": cell["workload"],
        "link": cell["link"],
        "num_plans": len(ran),
        "failed": [f"{row['words']}: {row['error']}" for row in rows if row["error"]],
        "best": rows[best]["words"],
        "best_seconds": finals[best],
        "chosen": rows[cell["standing"]["chosen"]]["words"],
        "regret": {
            name: finals[number] / finals[best] for name, number in cell["standing"].items() if number in finals
        },
        "error": statistics.median(abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)),
        "correlation": rank_correlation(predicted, measured),
    }


def seconds_of(row: Found) -> float:
    return typical(row["turns"]) if row["turns"] else float(row["first_seconds"])


def rank_correlation(ones: list[float], others: list[float]) -> float:
    """Spearman's: 1 where both put the plans in the same order."""
    if len(ones) < 2:
        return 1.0
    return statistics.correlation(*(_places(values) for values in (ones, others)))


def _places(values: list[float]) -> list[float]:
    """Of equal values, the mean of their places."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def table(found: list[Found]) -> str:
    lines = [
        "| workload | link | plans | chosen plan | chosen / best | always DDP | always ZeRO 3 | best plan | step | error | rank |",
        "|---|---|---:|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for cell in found:
        ratios = [ratio(cell["regret"].get(name)) for name in ANSWERS]
        best = "the same" if cell["best"] == cell["chosen"] else cell["best"]
        lines.append(
            f"| {cell['workload']} | {cell['link']} | {cell['num_plans']} | {cell['chosen']} | {ratios[0]} | {ratios[1]} | "
            f"{ratios[2]} | {best} | {1e3 * cell['best_seconds']:.0f} ms | {cell['error']:.0%} | {cell['correlation']:.2f} |"
        )
    for words, over in (("median", statistics.median), ("worst", max)):
        each = [[cell["regret"][name] for cell in found if name in cell["regret"]] for name in ANSWERS]
        figures = [ratio(over(values)) if values else "" for values in each]
        lines.append(f"| **{words}** | | | | **{figures[0]}** | {figures[1]} | {figures[2]} | | | | |")
    return "\n".join(lines)


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def show_rows(cell: Found) -> None:
    """Every plan, the fastest first: measured, of it the processor's, predicted, and the parts of the prediction."""
    print(f"\n{cell['workload']}, {cell['link']}: {cell['model']}, global batch {cell['global_batch']}")
    ran = sorted((row for row in cell["rows"] if row["first_seconds"] is not None), key=seconds_of)
    for row in ran:
        parts = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in row["predicted_parts"].items() if value > 5e-5)
        measured, predicted = seconds_of(row), row["predicted_seconds"]
        print(
            f"{1e3 * measured:8.1f} ms (busy {1e3 * row['busy_seconds']:6.1f}) {1e3 * predicted:8.1f} ms "
            f"{predicted / measured - 1:+5.0%} {len(row['turns']):2} turns  "
            f"{row['words']:60} {parts}"
        )


def write(text: str) -> None:
    """Between the markers of the document."""
    content = DOCUMENT.read_text()
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT} has no lines '{BEGIN}' and '{END}': put them where the table is to stand")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKLOADS, help="one workload alone")
    parser.add_argument("--link", choices=LINKS, help="one link alone")
    parser.add_argument(
        "--choose", choices=CHOOSERS, default=DEFAULT, help="by the search, or by the estimate of each plan"
    )
    parser.add_argument("--quick", action="store_true", help="few plans and rounds: a look, not a figure")
    parser.add_argument("--again", action="store_true", help="measure cells that are known once more")
    parser.add_argument("--show", action="store_true", help="every plan of every cell")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    add_to_path()
    FOLDER.mkdir(parents=True, exist_ok=True)
    links, workloads = (
        ([options.link] if options.link else [*LINKS]),
        ([options.only] if options.only else [*WORKLOADS]),
    )
    started = time.perf_counter()
    measure(links, workloads, options)
    files = [file_of(workload, link) for workload in workloads for link in links]
    cells = [json.loads(file.read_text()) for file in files if file.exists()]
    if not cells:
        raise SystemExit("nothing was measured")
    found = [judged(cell) for cell in cells]
    for cell in cells if options.show else ():
        show_rows(cell)
    print(f"\n{table(found)}\n\nmeasured in {time.perf_counter() - started:.0f} s")
    for cell in found:
        for words in cell["failed"]:
            print(f"did not run: {cell['workload']}, {cell['link']}: {words}")
    if options.write:
        write(table(found))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
