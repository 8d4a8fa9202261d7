"""Sweeps: money adds up, the fastest and the cheapest are named, points where nothing fits stay in the picture."""

from __future__ import annotations

import csv
import io
from xml.etree import ElementTree

import msgspec
import pytest
from machines import chain_graph, flat_plan, machine
from rich.console import Console

from meshwright.core.errors import InputError
from meshwright.cost.estimate import estimate
from meshwright.report.sweep import Sweep, SweepPoint, as_csv, as_rows, conclusion, sweep_view
from meshwright.report.sweep_page import sweep_page

GRAPH = chain_graph()


def point(hosts: int, tokens_per_second: float | None, batch: int = 8) -> SweepPoint:
    sizes = SweepPoint(
        num_hosts=hosts, num_devices=8 * hosts, global_batch=batch, reason="" if tokens_per_second else "no <room>"
    )
    if tokens_per_second is None:
        return sizes
    plan = flat_plan(GRAPH)
    found = msgspec.structs.replace(estimate(GRAPH, plan, machine(8)), tokens_per_second=tokens_per_second)
    return msgspec.structs.replace(sizes, plan=plan, estimate=found)


def swept(price: float | None = 2.0) -> Sweep:
    points = (point(1, None), point(2, 1e6), point(4, 3e6), point(8, 4e6))
    return Sweep(model="m", cluster="c", price=price, points=points)


def text_of(sweep: Sweep) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=160).print(sweep_view(sweep))
    return buffer.getvalue()


def test_money() -> None:
    """1e9 tokens at 1e6 a second are 1000 s on 16 devices, at 2 an hour each."""
    found = point(2, 1e6)
    assert found.hours == pytest.approx(1000 / 3600)
    assert found.money(2.0) == pytest.approx(2 * 16 * 1000 / 3600)
    assert found.money(None) is None
    assert point(1, None).money(2.0) is None


def test_the_fastest_and_the_cheapest() -> None:
    sweep = swept()
    assert sweep.fastest == sweep.points[3]
    assert sweep.cheapest == sweep.points[2]  # 32 devices for 333 s, against 16 for 1000 and 64 for 250
    assert sweep.cheapest == swept(None).cheapest
    fast, cheap = conclusion(sweep).splitlines()
    assert fast == "fastest: 8 hosts, 0.07 hours for 1e9 tokens, 8.89"
    assert cheap == "cheapest: 4 hosts, 0.09 hours, 5.93"
    assert "device-hours" in conclusion(swept(None))


def test_equal_points_leave_it_to_the_smaller_cluster() -> None:
    sweep = Sweep(model="m", cluster="c", points=(point(1, 1e6), point(2, 1e6)))
    assert sweep.fastest == sweep.cheapest == sweep.points[0]


def test_where_nothing_fits_anywhere() -> None:
    sweep = Sweep(model="m", cluster="c", points=(point(1, None),))
    assert (sweep.fastest, sweep.cheapest) == (None, None)
    assert "nothing fits at any point" in text_of(sweep)
    assert "nothing fits" in sweep_page(sweep)


def test_the_text_has_every_point_and_money_only_with_a_price() -> None:
    priced, free = text_of(swept()), text_of(swept(None))
    assert "no <room>" in priced
    assert "nothing fits" in priced
    assert priced.count("4 hosts") == 4  # three plots and the cheapest
    assert "money" in priced
    assert "money" not in free


def test_a_sweep_over_batches_is_told_by_batch() -> None:
    sweep = Sweep(model="m", cluster="c", points=(point(1, 1e6, 64), point(1, 2e6, 128)))
    assert "fastest: batch 128" in text_of(sweep)


def test_csv_holds_the_same_figures() -> None:
    sweep = swept()
    rows = list(csv.DictReader(io.StringIO(as_csv(as_rows(sweep)))))
    assert [row["num_hosts"] for row in rows] == ["1", "2", "4", "8"]
    assert rows[0]["step_seconds"] == ""
    assert rows[0]["reason"] == "no <room>"
    assert float(rows[2]["money_per_1e9_tokens"]) == sweep.points[2].money(2.0)


def test_a_sweep_survives_its_file() -> None:
    assert Sweep.from_json(swept().to_json()) == swept()


def test_the_page_is_one_well_formed_file() -> None:
    page = sweep_page(swept())
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "src=" not in page
    body = page.partition("<body>")[2].partition("</body>")[0]
    root = ElementTree.fromstring(f"<body>{body}</body>")
    pictures = list(root.iter("{http://www.w3.org/2000/svg}svg"))
    assert len(pictures) == 4
    for picture in pictures:
        bars = list(picture.iter("{http://www.w3.org/2000/svg}rect"))
        heights = [float(bar.get("height", 0)) for bar in bars]
        assert len(bars) == 3
        assert max(heights) == pytest.approx(160.0)
    hours = [float(bar.get("height", 0)) for bar in pictures[0].iter("{http://www.w3.org/2000/svg}rect")]
    assert hours[0] / hours[1] == pytest.approx(3.0, rel=0.01)
    assert "no &lt;room&gt;" in page


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,2,4", [1, 2, 4]),
        ("1..8", [1, 2, 4, 8]),
        ("1..6", [1, 2, 4, 6]),
        ("3", [3]),
        ("2..2", [2]),
        ("1, 4..16", [1, 4, 8, 16]),
    ],
)
def test_lists_and_ranges(text: str, numbers: list[int]) -> None:
    from meshwright.cli.sweep import parse_list

    assert parse_list(text, "--hosts") == numbers


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "2,1", "1,1", "8..2", "1..", "..4", "1.5"])
def test_lists_that_are_none(text: str) -> None:
    from meshwright.cli.sweep import parse_list

    with pytest.raises(InputError, match="--hosts"):
        parse_list(text, "--hosts")
