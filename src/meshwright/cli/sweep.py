"""`meshwright sweep`: the best plan at each of several cluster sizes or batch sizes, in time, memory and money."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from meshwright.cli import options
from meshwright.core.codec import write_whole
from meshwright.core.errors import InputError
from meshwright.jobs.output import make_console, print_json, writing
from meshwright.planner import sweep as planner
from meshwright.report.sweep import Sweep, as_csv, as_rows, sweep_view
from meshwright.report.sweep_page import sweep_page

FORMATS = (".html", ".csv", ".json")


@options.plan_flags
def sweep(
    model: Annotated[str, Argument(metavar="MODEL")],
    flags: options.PlanFlags,
    cluster: options.ClusterOption = "local",
    hosts: Annotated[
        str | None, Option(metavar="LIST", help="Numbers of hosts: 1,2,4, or 1..8 for 1, 2, 4, 8.")
    ] = None,
    global_batch: Annotated[
        str | None, Option(metavar="LIST", help="Samples per step: 64,128, or 64..512 for 64, 128, 256, 512.")
    ] = None,
    price: Annotated[float | None, Option(help="Money per device-hour, in any currency.")] = None,
    memory: options.MemoryOption = None,
    search: options.SearchOption = "joint",
    prefer_fastest: options.PreferFastestFlag = False,
    output: Annotated[str | None, Option("-o", "--output", help="Save as .html, .csv or .json.")] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Search the best plan at each of several cluster sizes or batch sizes, to choose what to rent.

    \b
    How many hosts?  A range doubles from its first number to its last:
      meshwright sweep MODEL --cluster a100-80g-selene --hosts 1..16 --global-batch 512 --price 2.0
    Which batch?
      meshwright sweep MODEL --cluster a100-80g-selene --hosts 2 --global-batch 128,256,512
    A page to show to others:
      meshwright sweep MODEL --cluster a100-80g-selene --hosts 1,2,3,4 --price 2.0 -o sweep.html
    """
    if flags.file is not None:
        raise InputError("--plan gives a whole plan, and this verb searches one at each point: leave it out")
    if output is not None and Path(output).suffix not in FORMATS:
        raise InputError(f"{output}: a sweep is saved as {', '.join(FORMATS)}")
    sizes = parse_list(hosts, "--hosts") if hosts is not None else None
    batches = parse_list(global_batch, "--global-batch") if global_batch is not None else None
    console = make_console(as_json)

    def find(watch: planner.Watch | None = None) -> Sweep:
        return planner.sweep(
            model, cluster, hosts=sizes, global_batch=batches, price=price, memory=memory, search=search,
            prefer_fastest=prefer_fastest, say=console.print, watch=watch, **flags.request.fixed,
        )  # fmt: skip

    if as_json:
        found = find()
    else:
        with console.status("searching …") as status:
            found = find(
                lambda number, count, on: status.update(f"searching {number} of {count}: {on.num_devices} devices")
            )
    console.print(sweep_view(found))
    if output is not None:
        save(found, output)
        console.print(f"saved as {output}")
    if as_json:
        print_json(as_object(found))


def parse_list(text: str, flag: str) -> list[int]:
    """`1,2,4` as it stands; `1..8` doubles: 1, 2, 4, 8; the last number is always among them."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()) or int(first) < 1:
            raise InputError(f"{flag} {text}: '{part}' is not a number or a range: write it like 1,2,4 or 1..8")
        numbers += _doubling(int(first), int(last)) if dots else [int(first)]
    if sorted(set(numbers)) != numbers:
        raise InputError(f"{flag} {text}: give each number once, the smaller first")
    return numbers


def _doubling(first: int, last: int) -> list[int]:
    numbers = [first]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return numbers if last == first else [*numbers, last]


def save(found: Sweep, output: str) -> None:
    target = Path(output)
    with writing(output):
        if target.suffix == ".json":
            found.save(target)
        else:
            write_whole(target, sweep_page(found) if target.suffix == ".html" else as_csv(as_rows(found)))


def as_object(found: Sweep) -> dict[str, Any]:
    """A sweep as one JSON object."""
    plans = [{"plan": point.plan, "search_seconds": point.search_seconds} for point in found.points]
    rows = [{**row, "words": row["plan"], **plan} for row, plan in zip(as_rows(found), plans, strict=True)]
    return {
        "model": found.model,
        "cluster": found.cluster,
        "price": found.price,
        "points": rows,
        "fastest": found.points.index(found.fastest) if found.fastest else None,
        "cheapest": found.points.index(found.cheapest) if found.cheapest else None,
    }
