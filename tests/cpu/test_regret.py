"""The regret benchmark's own parts: its space, who gets into the finals, and the table. That it measures shows when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import regret
import regret_h200
from regret_choice import standing_answers, thinned
from regret_ranks import finalists_of, typical
from regret_space import Workload, every_plan, graph_and_source, legal_shardings, words_of

from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.plan import Plan


@pytest.fixture(scope="module")
def tiny_moe() -> tuple[list[Plan], list[str]]:
    graph, source = graph_and_source(
        Workload("moe:layers=4,hidden=16,heads=2,seq=8,vocab=32,experts=4,top=1,capacity=0,balance=0", 8)
    )
    return every_plan(graph, 8, legal_shardings(graph, source), "")


def test_the_space_holds_every_way_and_says_what_it_leaves_out(tiny_moe: tuple[list[Plan], list[str]]) -> None:
    plans, refused = tiny_moe
    words = [words_of(plan) for plan in plans]
    assert len(set(words)) == len(plans)
    assert {plan.world for plan in plans} == {1, 2}
    for way in (
        "one device",
        "dp 2 · ZeRO 3",
        "dp 2 · ep 2",
        "tp 2",
        "cp 2",
        "pp 2 gpipe",
        "pp 2 dualpipev",
        "sequence parallel",
    ):
        assert any(way in one for one in words), way
    assert {plan.global_batch for plan in plans} == {8}
    assert refused
    assert all("dualpipev" in reason for reason in refused)
    assert len(plans) + len(refused) == 2 * 3 * (9 + len(KINDS))


def test_standing_answers_are_plain(tiny_moe: tuple[list[Plan], list[str]]) -> None:
    plans, _ = tiny_moe
    found = standing_answers(plans)
    assert words_of(plans[found["ddp"]]) == "dp 2 · replicated · 1 microbatch of 4"
    assert words_of(plans[found["zero3"]]) == "dp 2 · ZeRO 3 · 1 microbatch of 4"
    few = thinned(plans)
    assert not any(plan.recompute for plan in few)
    assert len(standing_answers(few)) == 2


def test_the_finals_hold_those_near_the_best_and_the_standing_ones() -> None:
    first = [{"seconds": seconds} for seconds in (1.0, 5.0, 1.2, 2.0, None)]
    assert finalists_of(first, {"chosen": 3, "ddp": 4}) == [0, 2, 3]
    many = [{"seconds": 1.0 + number / 1000} for number in range(30)]
    assert finalists_of(many, {"chosen": 29}) == [*range(10), 29]


def cell(seconds: list[float], predicted: list[float], chosen: int) -> dict[str, Any]:
    rows = [
        {"words": f"plan {number}", "turns": [one], "first_seconds": one, "predicted_seconds": guess, "error": ""}
        for number, (one, guess) in enumerate(zip(seconds, predicted, strict=True))
    ]
    return {"workload": "w", "link": "l", "rows": rows, "standing": {"chosen": chosen, "ddp": 0}}


def test_regret_is_over_the_best_measured() -> None:
    found = regret.judged(cell([2.0, 1.0, 1.1], [1.0, 3.0, 2.0], chosen=2))
    assert found["regret"] == {"chosen": pytest.approx(1.1), "ddp": 2.0}
    assert found["best"] == "plan 1"
    assert found["correlation"] == pytest.approx(-1.0)
    assert found["error"] == pytest.approx(2.0 / 1.1 - 1)
    text = regret.table([found, regret.judged(cell([1.0, 2.0], [1.0, 2.0], chosen=0))])
    assert "| w | l | 3 | plan 2 | 1.10 | 2.00 |  | plan 1 | 1000 ms |" in text
    assert "| **worst** | | | | **1.10** | 2.00 |" in text
    assert "| **median** | | | | **1.05** | 1.50 |" in text


def test_a_turn_that_was_disturbed_does_not_count() -> None:
    assert typical([1.0, 1.2, 9.0, 8.0]) == pytest.approx(1.1)


def test_the_table_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{regret.BEGIN}\nold\n{regret.END}\nafter\n")
    monkeypatch.setattr(regret, "DOCUMENT", document)
    regret.write("new")
    assert document.read_text() == f"before\n{regret.BEGIN}\nnew\n{regret.END}\nafter\n"
    document.write_text("no markers")
    with pytest.raises(SystemExit, match="put them where the table is to stand"):
        regret.write("new")


def test_the_document_has_a_place_for_the_table() -> None:
    content = regret.DOCUMENT.read_text()
    assert content.index(regret.BEGIN) < content.index(regret.END)


def test_rows_of_one_gpu() -> None:
    rows = regret_h200.rows_of(is_tiny=False, only=None, compiled=(False, True))
    assert len(rows) == 24
    assert all(row["global_batch"] % row["microbatch"] == 0 for row in rows)
    assert len(regret_h200.rows_of(is_tiny=False, only="6.7B", compiled=(False,))) == 6
