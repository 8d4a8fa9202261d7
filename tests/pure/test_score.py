"""The score: errors, out-of-memory calls, sweeps; and its table, picture and page."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_published import HEADER, ROW, run_of, write
from transformer import transformer_graph

from meshwright.cli.score import score as score_command
from meshwright.core.cluster import Facts, catalogue
from meshwright.core.errors import CaptureError, InputError, ModelError
from meshwright.core.graph import Casting, Graph, Precision
from meshwright.core.units import GIB
from meshwright.interop.published import Run, Unreadable
from meshwright.report.accuracy import BEGIN, END, score_table, worst_table, write_section
from meshwright.report.explain import explain_table, figures
from meshwright.report.scatter import scatter
from meshwright.report.score import Prediction, by_table, cluster_of, predict, quantile, regret, score, spearman
from meshwright.report.tables import as_text


def predicted(
    measured: float | None, seconds: float | None, *, fits: bool | None = True, **changes: object
) -> Prediction:
    run = run_of(step_seconds=measured, fits=changes.pop("ran", True), **changes)
    return Prediction(run=run, step_seconds=seconds, peak_bytes=GIB, fits=fits, failure="" if seconds else "no")


def test_errors_are_relative_and_a_failure_is_one() -> None:
    rows = [predicted(10.0, 11.0), predicted(10.0, 9.0), predicted(10.0, None)]
    found = score(rows)
    assert (found.num_rows, found.num_failures) == (3, 1)
    assert found.step_time_median_error == pytest.approx(0.1)
    assert found.step_time_p90_error == pytest.approx(0.1 + 0.8 * 0.9)


def test_memory_is_compared_in_gib() -> None:
    row = msgspec.structs.replace(predicted(10.0, 10.0), run=run_of(peak_gb=2.0))
    assert row.memory_error == pytest.approx(-0.5)


def test_out_of_memory() -> None:
    rows = [
        predicted(None, 9.0, fits=False, ran=False), predicted(None, 9.0, fits=True, ran=False),
        predicted(9.0, 9.0, fits=False), predicted(9.0, 9.0), predicted(9.0, 9.0), predicted(9.0, 9.0),
    ]  # fmt: skip
    found = score(rows)
    assert (found.oom_recall, found.oom_false_alarm_rate) == (0.5, 0.25)


def test_what_a_table_does_not_have_is_none() -> None:
    found = score([predicted(None, 5.0, ran=None)])
    assert found.step_time_median_error is None
    assert found.oom_recall is None
    assert found.sweep_regret_median is None


def test_regret_is_paid_for_what_we_would_have_chosen() -> None:
    fast, slow = predicted(10.0, 12.0, tp=1), predicted(20.0, 11.0, tp=2, dp=4)
    assert regret([fast, slow]) == 2.0
    does_not_fit = predicted(20.0, 1.0, fits=False, tp=2, dp=4)
    assert regret([fast, does_not_fit]) == 1.0
    assert score([fast, slow]).sweep_regret_median == 2.0


def test_rows_of_several_tables() -> None:
    rows = [predicted(10.0, 10.0, source_table="a"), predicted(10.0, 20.0, source_table="b")]
    assert {name: found.step_time_median_error for name, found in by_table(rows).items()} == {"a": 0.0, "b": 1.0}


@given(st.lists(st.floats(0.1, 1e3), min_size=3, max_size=8, unique=True))
def test_rank_correlation(values: list[float]) -> None:
    assert spearman(values, [2 * value for value in values]) == pytest.approx(1)
    assert spearman(values, [-value for value in values]) == pytest.approx(-1)
    assert spearman(values, [1.0] * len(values)) is None


def test_quantiles() -> None:
    assert quantile([], 0.9) is None
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.9) == pytest.approx(0.9)


SIZES = {"layers": 4, "hidden": 64, "heads": 4, "seq": 32, "vocab": 2048}


def graph_of(model: str, precision: Precision, casting: Casting = "autocast") -> Graph:
    return msgspec.structs.replace(transformer_graph(layers=4, precision=precision), casting=casting)


def test_runs_are_predicted_and_one_that_cannot_be_says_why() -> None:
    facts: dict[str, Facts] = catalogue()
    runs: list[Run] = [
        run_of(cluster="a100-80g-selene", step_seconds=1.0, **SIZES),
        run_of(cluster="a100-80g-seleen", step_seconds=1.0, **SIZES),
        run_of(cluster="a100-80g-selene", tp=5, dp=1, step_seconds=1.0, **SIZES),
    ]
    fine, unknown, undivided = predict(runs, facts, graph_of)
    assert fine.step_seconds is not None
    assert fine.fits
    assert "did you mean 'a100-80g-selene'?" in unknown.failure
    assert "5 ranks, but there are 8" in undivided.failure
    assert unknown.time_error == undivided.time_error == 1.0


@pytest.mark.parametrize(
    ("cluster", "word", "precision"),
    [("v100-16g-p3", "fp16", "fp16"), ("a100-80g-selene", "fp16", "bf16"), ("a100-80g-selene", "fp32", "fp32")],
)
def test_the_graph_is_captured_in_the_precision_of_the_row(cluster: str, word: str, precision: str) -> None:
    asked: list[str] = []

    def graph(model: str, precision: Precision, casting: Casting) -> Graph:
        asked.append(precision)
        return graph_of(model, precision, casting)

    (found,) = predict([run_of(cluster=cluster, precision=word, **SIZES)], catalogue(), graph)
    assert asked == [precision]
    assert found.failure == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModelError("no such model"), "no such model"),
        (CaptureError("cannot be followed"), "cannot be followed"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (KeyError("missing"), "KeyError: 'missing'"),
        (ValueError("odd"), "ValueError: odd"),
        (TypeError("wrong"), "TypeError: wrong"),
        (AssertionError("never"), "AssertionError: never"),
        (RuntimeError("torch\nits stack"), "RuntimeError: torch"),
    ],
)
def test_whatever_one_row_raises_the_others_are_predicted(error: Exception, said: str) -> None:
    def graph(model: str, precision: Precision, casting: Casting) -> Graph:
        if "layers=5" in model:
            raise error
        return graph_of(model, precision, casting)

    fine = run_of(cluster="a100-80g-selene", step_seconds=1.0, **SIZES)
    bad = msgspec.structs.replace(fine, layers=5)
    found = predict([bad, fine], catalogue(), graph)
    assert [p.failure for p in found] == [said, ""]
    assert score(found).num_failures == 1


@pytest.mark.parametrize("degrees", [{"dp": 4}, {"tp": 3, "dp": 2}])
def test_degrees_that_are_not_all_gpus_fail_the_row(degrees: dict[str, object]) -> None:
    (found,) = predict([run_of(**{"cluster": "a100-80g-selene", **SIZES, **degrees})], catalogue(), graph_of)
    assert "ranks, but there are 8: change a degree" in found.failure


def test_a_row_that_cannot_be_read_is_an_error_of_100_percent() -> None:
    row = Unreadable(id="a", source_table="t", problem="hidden is 'wide'", step_seconds=2.0, peak_gb=3.0, fits=False)
    (found,) = predict([row], {}, graph_of)
    total = score([found])
    assert (total.num_rows, total.num_failures, total.num_sweeps) == (1, 1, 0)
    assert (total.step_time_median_error, total.memory_median_error, total.oom_recall) == (1.0, 1.0, 0.0)
    assert "hidden is 'wide'" in as_text(worst_table([found]), width=200)


def test_no_row_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    captured: list[str] = []

    def capture(model: str, precision: Precision, casting: Casting) -> Graph:
        captured.append(model)
        if "layers=72" in model:
            raise ModelError("cannot be built")
        return graph_of(model, precision, casting)

    monkeypatch.setattr("meshwright.planner.graphs.graph_of", capture)
    fine = "b,new,,4,64,4,2048,32,a100-80g-selene,8,2,1,,1,1,8,none,0,0,bf16,0,,1.0,1.0,1,,,"
    lines = (
        HEADER, ROW, ROW, fine, fine.replace("selene", "nowhere"), fine.replace(",4,64", ",[/b],64"),
        fine.replace(",8,2,1,,", ",8,2,1,3,"), fine.replace("a100-80g-selene", "v100-16g-p3"),
    )  # fmt: skip
    clusters = tmp_path / "clusters.json"
    clusters.write_bytes(resources.files("meshwright.core").joinpath("clusters.json").read_bytes())
    score_command(str(write(tmp_path, *lines)), str(clusters), rows=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], found["num_failures"]) == (7, 5)
    assert [bool(row["failure"]) for row in found["rows"]] == [True, True, False, True, True, True, False]
    assert sum("layers=72" in model for model in captured) == 1


def test_a_table_is_predicted_without_itself() -> None:
    facts = catalogue()
    own, other = (
        cluster_of(run_of(cluster="a100-80g-jeanzay", source_table=table), facts).device
        for table in ("tr11", "unknown")
    )
    assert "tr11" not in own.origins["matmul_share"]
    assert "tr11" in other.origins["matmul_share"]


def rows() -> list[Prediction]:
    return [predicted(10.0 * (1 + n), 11.0 * (1 + n), source_table=f"t{n % 2}") for n in range(6)]


def test_the_tables_show_every_source() -> None:
    text = as_text(score_table(rows()), width=180)
    assert all(name in text for name in ("t0", "t1", "all", "10.0%"))
    assert "+10%" in as_text(worst_table(rows()), width=200)


def test_the_page_is_rewritten_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_section(page, rows(), "meshwright score")
    write_section(page, rows(), "meshwright score")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| all |") == 1
    assert (tmp_path / "accuracy-published.svg").read_text().count("<title>") == 6


def test_a_page_without_predicted_times_has_no_picture(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    write_section(page, [predicted(10.0, None)], "meshwright score")
    text = page.read_text(encoding="utf-8")
    assert "| all |" in text
    assert "![" not in text
    assert not (tmp_path / "accuracy-published.svg").exists()


@pytest.mark.parametrize("value", [1.0, 10.0, 3.0])
def test_points_in_one_place_are_drawn(value: float) -> None:
    assert scatter([("t", value, value)], "s").count("<title>") == 1


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text("mine\n", encoding="utf-8")
    with pytest.raises(InputError, match="add them where the score should stand"):
        write_section(page, rows(), "meshwright score")
    assert page.read_text() == "mine\n"


def test_the_picture_escapes_names() -> None:
    assert "&lt;b&gt;" in scatter([("<b>", 1.0, 2.0), ("<b>", 10.0, 9.0)], "s")


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_figure_has_a_unit_a_meaning_and_an_origin(name: str) -> None:
    from meshwright.core.cluster import Cluster

    found = figures(Cluster.named(name))
    assert len({figure.name for figure in found}) == len(found)
    assert all(figure.origin and figure.meaning for figure in found)
    assert "matmul_share" in as_text(explain_table(Cluster.named(name)), width=200)
