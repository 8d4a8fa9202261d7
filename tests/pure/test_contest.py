"""Plans compared: short names, who wins and whether it is more than noise, what the runs show."""

from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from runs import run_of

from meshwright.core.errors import InputError
from meshwright.core.request import PlanRequest
from meshwright.core.run.trace import StepRecord
from meshwright.planner.short_plans import contenders, parse_short
from meshwright.report.contest import findings, judge, loss_difference, loss_words, noise, row_of, rows_of, said_about
from meshwright.report.contest_table import contest_tables
from meshwright.report.histogram import NUM_BINS, bars, counted, shared_edges
from meshwright.report.run import Run


def timed(name: str, seconds: list[float], *repeats: list[float], **request: object) -> Run:
    """A run whose steps took so long; its first step warms up and does not count."""
    run = run_of(name, **request)
    trace = run.traces[0]
    records = tuple(
        StepRecord(step=step, loss=1.0, seconds=value, time_seconds=trace.time_seconds, tokens=1)
        for step, value in enumerate([9.0, *seconds])
    )
    traces = tuple(msgspec.structs.replace(one, steps=records) for one in run.traces)
    return replace(run, traces=traces, repeats=tuple(tuple(one) for one in repeats))


# Names


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("ddp", PlanRequest(zero=0)),
        ("zero3", PlanRequest(zero=3)),
        ("tp2", PlanRequest(tp=2)),
        ("pp4+zero1", PlanRequest(pp=4, zero=1)),
        ("ddp+recompute+compile", PlanRequest(zero=0, recompute="full", compile=True)),
        ("search", PlanRequest()),
    ],
)
def test_short_names(text: str, request_: PlanRequest) -> None:
    assert parse_short(text) == request_


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero4", "unknown word 'zero4': did you mean"),
        ("tp0", "unknown word 'tp0'"),
        ("ddp+zero1", "says two things about zero"),
        ("", "unknown word ''"),
    ],
)
def test_wrong_names(text: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_short(text)
    assert said in str(refused.value)


def test_each_plan_on_the_ranks_it_can_run_on() -> None:
    chosen, left_out = contenders(("one", "ddp", "tp2", "ddp"), (1, 2, 4, 2))
    assert [one.name for one in chosen] == ["one on 1", "ddp on 2", "ddp on 4", "tp2 on 2", "tp2 on 4"]
    assert left_out == ["ddp on 1: on one rank it is the plan 'one'", "tp2 on 1: it runs on multiples of 2"]


def test_who_asks_for_one_rank_gets_one() -> None:
    """On one rank replicas and shards are the same plan: it is run once, and first, as what the others are compared with."""
    chosen, left_out = contenders(("ddp", "zero3"), (1, 2))
    assert [one.name for one in chosen] == ["one on 1", "ddp on 2", "zero3 on 2"]
    assert len(left_out) == 2
    assert [one.name for one in contenders(("ddp",), (2,))[0]] == ["ddp on 2"]


# Who wins


def test_a_margin_beyond_the_noise() -> None:
    judgement = judge([timed("slow", [2.0, 2.0], [2.1, 2.1]), timed("fast", [1.0, 1.0], [1.05, 1.05])])
    assert judgement is not None
    assert judgement.first.name == "fast"
    assert judgement.margin == pytest.approx(2.05 / 1.025 - 1)
    assert judgement.noise == pytest.approx(0.05)
    assert judgement.exceeds_noise
    assert "more than the noise" in str(judgement)


def test_a_margin_within_the_noise() -> None:
    judgement = judge([timed("one", [1.0, 1.0], [1.3, 1.3]), timed("two", [1.1, 1.1], [1.25, 1.25])])
    assert judgement is not None
    assert not judgement.exceeds_noise
    assert "not more than the noise between repeats" in str(judgement)
    single = judge([timed("one", [1.0, 1.0]), timed("two", [2.0, 2.0])])
    assert "between the two halves of a run's steps" in str(single)
    assert judge([timed("alone", [1.0])]) is None


def test_without_repeats_noise_is_between_the_halves() -> None:
    assert noise(timed("run", [1.0, 1.0, 1.2, 1.2])) == pytest.approx(0.2)
    assert noise(timed("run", [1.0])) == 0.0


def test_losses_that_differ_are_seen() -> None:
    one, two = run_of("one"), run_of("two")
    assert loss_difference(one, two) == 0.0
    other = replace(two, metrics=tuple({**line, "loss": 1.1 * line["loss"]} for line in two.metrics))
    assert loss_difference(other, one) == pytest.approx(0.1)
    assert loss_difference(replace(two, metrics=()), one) is None
    lost = replace(two, metrics=tuple({**line, "loss": float("nan")} for line in two.metrics))
    assert loss_difference(lost, one) == float("inf")
    assert "differ from one from the first step on" in loss_words([one, lost])


def test_losses_that_drift_are_told_from_wrong_ones() -> None:
    one = run_of("one")
    wrong = replace(run_of("wrong"), metrics=tuple({**line, "loss": 1.1 * line["loss"]} for line in one.metrics))
    drifting = replace(
        run_of("drifting"),
        metrics=tuple({**line, "loss": (1 + 0.01 * line["step"]) * line["loss"]} for line in one.metrics),
    )
    assert loss_words([one, run_of("same")]) == ""
    said = loss_words([one, wrong, drifting])
    assert "the losses of wrong differ from one from the first step on" in said
    assert "the losses of drifting begin like one's and drift apart" in said


def test_a_row_has_all_figures() -> None:
    run = timed("run", [1.0, 2.0, 3.0], [4.0])
    row = row_of(run, run, epoch_steps=10)
    assert row["step_seconds"]["mean"] == pytest.approx(2.5)
    assert row["step_seconds"]["median"] == pytest.approx(2.5)
    assert row["epoch_seconds"] == pytest.approx(25.0)
    assert row["communication_bytes"] == 4096
    assert row["max_loss_difference"] == 0.0
    assert row["repeats"] == 2
    assert row_of(run, run, None)["epoch_seconds"] is None


def test_the_table_puts_the_fastest_first() -> None:
    buffer = io.StringIO()
    runs = [timed("slow", [2.0, 2.0]), timed("fast", [1.0, 1.0])]
    time, memory = contest_tables(runs, None)
    Console(file=buffer, width=140).print(time, memory)
    text = buffer.getvalue()
    assert text.index("\n fast") < text.index("\n slow")
    assert "histogram: 1.00 s to 2.00 s" in text
    assert "optimizer" in text[text.index("memory of the fullest rank") :]


def test_what_the_runs_show() -> None:
    runs = [timed("one on 1", [1.0], dp=1), timed("ddp on 2", [2.0]), timed("zero3 on 2", [3.0], zero=3)]
    said = " ".join(findings(runs))
    assert "Optimizer state per rank: 7.81 KiB (one on 1, zero3 on 2)." in said
    assert "ddp on 2 takes 2.00 s per step, zero3 on 2 3.00 s (50% more)" in said


def test_all_runs_share_the_bins_of_a_histogram() -> None:
    runs = [timed("slow", [2.0, 2.0, 2.5]), timed("fast", [1.0, 1.0])]
    edges = shared_edges(runs)
    assert (edges[0], len(edges)) == (1.0, NUM_BINS + 1)
    rows = rows_of(runs, None)
    assert [sum(row["histogram"]["counts"]) for row in rows] == [3, 2]
    assert rows[0]["histogram"]["edges_seconds"] == rows[1]["histogram"]["edges_seconds"]
    assert counted([1.0, 99.0], edges)[-1] == 1, "a slower step counts in the last bin"
    assert bars([0, 1, 8]) == " ▁█"
    assert rows_of([replace(runs[0], traces=())], None)[0]["histogram"] is None


def test_what_is_said_about_all() -> None:
    runs = [timed("one", [1.0, 1.0]), timed("two", [2.0, 2.0])]
    first, agree, *_ = said_about(runs)
    assert first.startswith("one is fastest: 100.0% ahead of two")
    assert agree == "Losses agree within 0 of one's over the first 10 steps."
    other = timed("other", [1.0, 1.0], global_batch=16)
    assert (
        "global batches differ, so that a step is not the same work: 8 (one); 16 (other)"
        in said_about([runs[0], other])[1]
    )
    wrong = replace(runs[1], metrics=tuple({**line, "loss": 1.1 * line["loss"]} for line in runs[1].metrics))
    said = " ".join(said_about([runs[0], wrong]))
    assert "Warning: the losses of two differ" in said
    assert "agree" not in said
