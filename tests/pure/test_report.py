"""The report without a browser: verdicts, the slow rank, overlap, Chrome traces, sizes, and folders that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runs import run_of, trace_of

from meshwright.core.errors import InputError
from meshwright.core.run.trace import Interval
from meshwright.jobs.runs import check_comparable, read_run, read_runs, telling_names, write_page
from meshwright.report.chrome import chrome_trace
from meshwright.report.comparison import Line
from meshwright.report.fullest import fullest_words
from meshwright.report.overlap import exposed_share, overlap, shared_seconds
from meshwright.report.page import page
from meshwright.report.page_data import page_data
from meshwright.report.run import Run, percentile
from meshwright.report.straggler import find_straggler
from meshwright.report.verdict import verdict


def save(run: Run, folder: Path) -> Path:
    """A run folder as `meshwright train` leaves it."""
    folder.mkdir()
    (folder / "settings.toml").write_text(run.settings)
    run.plan.save(folder / "plan.json")
    run.estimate.save(folder / "estimate.json")
    assert run.cluster is not None
    assert run.forecast is not None
    assert run.worst is not None
    run.cluster.save(folder / "cluster.json")
    run.forecast.save(folder / "forecast.json")
    run.worst.save(folder / "trace.json")
    for trace in run.traces:
        trace.save(folder / "traces" / f"rank-{trace.rank:05d}.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.metrics))
    return folder


# Words


def test_the_verdict_says_what_was_promised_and_what_came() -> None:
    did, promised, time = verdict(run_of())
    assert "ran 20 steps, 100.0 ms each by the median" in did
    assert "It was promised" in promised
    assert "outside the promised 10%" in promised
    assert "Most of the step is backward (50%); 15% is not work, most of that waiting for reductions" in time


def test_the_verdict_of_a_plan_that_has_not_run() -> None:
    said = " ".join(verdict(replace(run_of(), traces=(), metrics=())))
    assert "nothing has run" in said
    assert "fits" in said


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile((1.0, 2.0, 3.0, 4.0), 0.5) == 2.5
    assert percentile((1.0,), 0.95) == 1.0
    assert percentile(tuple(float(value) for value in range(101)), 0.95) == pytest.approx(95.0)


def test_many_times_too_much_is_said_as_that() -> None:
    lines = [Line("memory", predicted, 100.0, str).cells[3] for predicted in (105.0, 1000.0, 25_000.0)]
    assert lines == ["+5.0%", "+900.0%", "250 times"]
    assert Line("memory", 1.0, 0.0, str).cells[3] == ""


# The slow rank


def test_a_slow_rank_is_named_with_its_share() -> None:
    plan = run_of(dp=4).plan
    traces = [trace_of(plan, rank, slow=1.5 if rank == 2 else 1.0) for rank in range(4)]
    slow = find_straggler(plan, traces)
    assert slow is not None
    assert slow.rank == 2
    assert slow.waiting_share == pytest.approx(0.5 * 0.06 / 0.085)
    assert "rank 2 is slow" in str(slow)
    assert "rank 2 is slow" in verdict(replace(run_of(dp=4), traces=tuple(traces)))[2]


def test_equal_ranks_and_ranks_with_other_work_are_not_slow() -> None:
    plan = run_of(dp=4).plan
    assert find_straggler(plan, [trace_of(plan, rank) for rank in range(4)]) is None
    assert find_straggler(plan, [trace_of(plan, rank, slow=1 + 0.3 * rank) for rank in range(4)]) is None
    stages = run_of(pp=2, dp=1).plan
    assert find_straggler(stages, [trace_of(stages, 0), trace_of(stages, 1, slow=2.0)]) is None


# Overlap


def test_exposed_and_hidden_add_up() -> None:
    wait = Interval(stream="compute", part="waiting", start_seconds=3.0, seconds=2.0)
    call = Interval(stream="communication", part="all_reduce", start_seconds=1.0, seconds=3.0, axis="dp", num_bytes=8)
    assert shared_seconds(call, [wait]) == 1.0
    trace = msgspec.structs.replace(trace_of(run_of().plan, 0), timeline=(wait, call))
    assert [(row["name"], row["measured"]) for row in overlap(trace)] == [
        ("dp: compute waits", 1.0),
        ("dp: hidden", 2.0),
    ]
    assert exposed_share(trace) == pytest.approx(1 / 3)
    assert exposed_share(msgspec.structs.replace(trace, timeline=(wait,))) is None


# Chrome's format


def test_all_ranks_lie_on_one_clock() -> None:
    run = run_of(dp=4)
    events = json.loads(chrome_trace(run.traces))["traceEvents"]
    first = {
        rank: min(event["ts"] for event in events if event["ph"] == "X" and event["pid"] == rank) for rank in range(4)
    }
    assert first == pytest.approx({0: 0.0, 1: 1000.0, 2: 2000.0, 3: 3000.0}, abs=1.0)
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"rank 0", "rank 1", "rank 2", "rank 3", "compute", "communication along dp"}
    assert {event["ph"] for event in events} == {"M", "X", "C"}


# The page


def test_the_page_holds_all_it_needs() -> None:
    text = page([run_of()], "a title & more")
    assert "a title &amp; more" in text
    assert "default-src 'none'" in text
    assert "connect-src" not in text
    assert 'src="' not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


@pytest.mark.parametrize(("per_sample", "unit"), [(1, "samples"), (128, "tokens")])
def test_speed_counts_samples_where_each_is_one_token(per_sample: int, unit: str) -> None:
    run = run_of()
    speed = per_sample * run.plan.global_batch / run.estimate.step_seconds
    counted = replace(run, estimate=msgspec.structs.replace(run.estimate, tokens_per_second=speed))
    assert f" {unit}/s" in verdict(counted)[0]
    assert f"<h3>{unit.capitalize()} per second</h3>" in page([counted], "demo")


def test_names_cannot_break_out_of_the_page() -> None:
    hostile = replace(run_of(), name="</script><script>alert(1)</script>", settings="</pre><script>alert(2)</script>")
    text = page([hostile, run_of()], "t")
    assert "<script>alert" not in text


def test_bars_nobody_can_see_are_joined() -> None:
    run = run_of(num_bars=20000)
    bars = [row for row in page_data([run])["runs"][0]["gantt"] if row["measured"]]
    assert max(len(row["start"]) for row in bars) <= 2100
    whole = run_of(num_bars=8)
    row = next(row for row in page_data([whole])["runs"][0]["gantt"] if row["name"] == "rank 0")
    assert row["part"] == ["forward", "backward", "waiting", "update"] * 2


# Folders


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_of(dp=4)
    found = read_run(str(save(run, tmp_path / "one")))
    assert found.traces == run.traces
    assert (found.plan, found.forecast, found.cluster) == (run.plan, run.forecast, run.cluster)
    assert list(found.metrics) == list(run.metrics)
    assert found.remark == ""
    assert write_page([found], str(tmp_path / "report.html")).exists()


def test_names_are_the_shortest_that_tell_runs_apart() -> None:
    paths = [Path("/a/cmp/ddp-on-2/0"), Path("/a/cmp/zero3-on-2/0")]
    assert telling_names(paths) == ["ddp-on-2", "zero3-on-2"]
    assert telling_names([Path("/a/x/0"), Path("/a/x/1"), Path("/a/y/0")]) == ["x/0", "x/1", "y/0"]
    assert telling_names([Path("/a/run"), Path("/a/run/inner")]) == ["run", "inner"]
    assert telling_names([Path("/a/run")]) == ["run"]


def test_a_folder_of_a_comparison_stands_for_its_runs(tmp_path: Path) -> None:
    """Repeats are one run; a repeat that was stopped has no trace, and is left out."""
    (tmp_path / "zero3-on-2").mkdir()
    (tmp_path / "ddp-on-2").mkdir()
    save(run_of(), tmp_path / "ddp-on-2" / "0")
    save(run_of(), tmp_path / "ddp-on-2" / "1")
    save(run_of(zero=3), tmp_path / "zero3-on-2" / "0")
    (save(run_of(zero=3), tmp_path / "zero3-on-2" / "1") / "trace.json").unlink()
    found = read_runs([str(tmp_path)])
    assert [(run.name, len(run.repeats)) for run in found] == [("ddp on 2", 1), ("zero3 on 2", 0)]
    assert len(found[0].step_seconds) == 2 * len(found[0].own_seconds)
    assert "ran 20 steps 2 times" in verdict(found[0])[0]


def test_the_fullest_moment_is_named() -> None:
    words = fullest_words(run_of())
    assert "on rank 1, 9.6 ms into the sampled step (forward)" in words
    assert "predicted: " in words


def test_steps_count_as_they_do_in_the_trace() -> None:
    """Without the sampled step and three that warm up; of few steps, without the first."""
    assert len(run_of(num_steps=20).step_seconds) == 16
    assert len(run_of(num_steps=5).step_seconds) == 3


def test_a_folder_of_an_older_version_is_read_with_a_remark(tmp_path: Path) -> None:
    folder = save(run_of(dp=4), tmp_path / "one")
    for file in (folder / "traces").iterdir():
        file.unlink()
    (folder / "forecast.json").unlink()
    (folder / "cluster.json").unlink()
    found = read_run(str(folder))
    assert "Only rank 3 of 4" in found.remark
    assert "forecast.json" in found.remark
    assert "rank 3" in page([found], "t")


def spoil(folder: Path, how: str) -> None:
    if how == "empty":
        for file in folder.glob("*.*"):
            file.unlink()
    elif how == "no trace":
        (folder / "trace.json").unlink()
    elif how == "truncated":
        file = folder / "traces" / "rank-00001.json"
        file.write_text(file.read_text()[:400])
    elif how == "other version":
        file = folder / "trace.json"
        for file in (folder / "traces").iterdir():
            file.write_text(file.read_text().replace('"format": 1', '"format": 2', 1))
    elif how == "other plan":
        trace = trace_of(run_of(dp=4).plan, 0)
        trace.save(folder / "traces" / "rank-00000.json")
    elif how == "broken line":
        (folder / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    elif how == "odd line":
        (folder / "metrics.jsonl").write_text('{"step": 0}\nnull\n')


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("empty", "is not a run folder: it has no settings.toml"),
        ("no trace", "has no trace.json: the run has not finished, or it failed"),
        ("truncated", "rank-00001.json: not valid JSON"),
        ("other version", "this version reads format 1; the file is from another version"),
        ("other plan", "the folder mixes two runs"),
        ("truncated", "restore the file"),
        ("other version", "read it with the version that wrote it, or train again"),
        ("odd line", "metrics.jsonl, line 2: not what a step leaves"),
        ("broken line", "metrics.jsonl, line 2: not valid JSON"),
    ],
)
def test_a_spoiled_folder_is_refused(tmp_path: Path, how: str, said: str) -> None:
    folder = save(run_of(), tmp_path / "one")
    spoil(folder, how)
    with pytest.raises(InputError) as refused:
        read_run(str(folder))
    assert said in str(refused.value)
    assert str(folder) in str(refused.value)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = save(run_of(), tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "lo')
    assert len(read_run(str(folder)).metrics) == 20


def test_other_models_are_not_compared() -> None:
    one, two = run_of("one"), run_of("two")
    check_comparable([one, two])
    other = replace(two, plan=msgspec.structs.replace(two.plan, graph="0123", model="another"))
    with pytest.raises(InputError, match="runs side by side must train the same model"):
        check_comparable([one, other])


def test_slips_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save(run_of(), tmp_path / "one")
    with pytest.raises(InputError, match="did you mean one of its folders: one"):
        read_run(str(tmp_path))
    with pytest.raises(InputError, match="is given twice"):
        read_runs([str(folder), str(folder)])
    with pytest.raises(InputError, match=r"a report is an \.html file"):
        write_page([run_of()], str(tmp_path / "report.pdf"))
