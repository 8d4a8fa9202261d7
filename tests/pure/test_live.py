"""A running job watched: the screen, the slowest rank, and the page that follows it in a browser."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest
from browser import CHROMIUM, Browser
from rich.console import Console
from runs import run_of
from test_report import save

from meshwright.core.errors import InputError
from meshwright.core.run.fault import RankState
from meshwright.jobs.live_page import served_page
from meshwright.jobs.runs import has_ended, rank_states
from meshwright.report.live_view import SHOWN_RANKS, live_view, silent_words, slowest_words, trend
from meshwright.training.folder import RunFolder


def state(rank: int, waiting: float | None = None) -> RankState:
    return RankState(rank=rank, step=3, seconds=0.1, memory_bytes=2**20 * (rank + 1), waiting_share=waiting, at=100.0)


def shown(ranks: list[RankState], num_lines: int = 20) -> str:
    run = run_of(num_steps=num_lines)
    going = replace(run, traces=(), metrics=tuple({**line, "seconds": 0.1} for line in run.metrics))
    buffer = io.StringIO()
    Console(file=buffer, width=100).print(live_view(going, ranks, num_steps=100, now=103.0))
    return buffer.getvalue()


def test_the_screen() -> None:
    said = shown([state(0, 0.3), state(1, 0.0)])
    assert "step 20 of 100, about 8.00 s to go" in said
    assert "loss 0.2500" in said
    assert "1.00 MiB" in said
    assert "3.00 s ago" in said
    assert "slowest: rank 1, which waits 0% of a step where the others wait 30%" in said


def test_before_the_first_step() -> None:
    assert "no step is done yet" in shown([], num_lines=0)


def test_of_many_ranks_the_fullest_are_shown() -> None:
    said = shown([state(rank) for rank in range(40)])
    assert len([line for line in said.splitlines() if "ago" in line]) == SHOWN_RANKS
    assert "40.00 MiB" in said
    assert "known once a step was sampled" in said


def test_a_run_that_says_nothing_is_remarked_upon() -> None:
    run = replace(run_of(), traces=(), metrics=({"step": 0, "seconds": 0.1}, {"step": 1, "seconds": 0.1}))
    slow = replace(run, metrics=({"step": 0, "seconds": 10.0},))
    assert silent_words([state(0)], run, now=125.0) == ""
    assert "no rank has ended a step for 31.00 s" in silent_words([state(0)], run, now=131.0)
    assert silent_words([state(0)], slow, now=131.0) == "", "its steps take longer than that"
    assert silent_words([], run, now=131.0) == ""


def test_equal_ranks_have_no_slowest() -> None:
    assert slowest_words([state(0, 0.10), state(1, 0.12)]) == "no rank keeps the others waiting"


def test_the_trend_goes_down() -> None:
    assert trend([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "█▇▆▅▄▃▂▁"
    assert trend([1.0]) == "▁"
    assert len(trend([float(value) for value in range(1000)])) == 40


def going(tmp_path: Path) -> RunFolder:
    """The folder of a run that goes on."""
    folder = save(run_of(), tmp_path / "run")
    (folder / "trace.json").unlink()
    (folder / "settings.toml").write_text('name = "demo"\nmodel = "gpt"\nsteps = 100\n')
    lines = [{"step": step, "loss": 5.0, "seconds": 0.1, "tokens_per_second": 9.0} for step in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    state(0).save(folder / "live" / "rank-00000.json")
    return RunFolder(folder)


def test_when_a_run_has_ended(tmp_path: Path) -> None:
    folder = going(tmp_path)
    assert not has_ended(folder)
    assert [one.rank for one in rank_states(folder)] == [0]
    folder.trace.write_text("{}")
    os.utime(folder.trace, (10.0, 10.0))
    assert not has_ended(folder), "the trace is of the run before it was resumed"
    os.utime(folder.metrics, (5.0, 5.0))
    assert has_ended(folder)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    folder = going(tmp_path)
    with served_page(folder, 0, 1.0) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(InputError, match="choose another, or 0"), served_page(folder, port, 1.0):
            pass


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["localhost:{port}"], 200),
        (["127.0.0.1:{port}"], 200),
        (["LOCALHOST"], 200),
        (["[::1]:{port}"], 200),
        (["localhost:9999"], 200),
        (["evil.example:{port}"], 421),
        (["localhost.evil.example"], 421),
        (["127.0.0.1.evil.example:{port}"], 421),
        (["localhost:{port}@evil.example"], 421),
        (["localhost:"], 421),
        (["[::1]x:{port}"], 421),
        (["localhost", "evil.example"], 421),
        ([], 421),
    ],
)
def test_only_requests_for_this_machine_are_answered(tmp_path: Path, hosts: list[str], status: int) -> None:
    """A page elsewhere may give its own name this machine's address, and then read what is served here."""
    with served_page(going(tmp_path), 0, 1.0) as address:
        port = int(address.rpartition(":")[2])
        connection = HTTPConnection("127.0.0.1", port)
        connection.putrequest("GET", "/", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host.format(port=port))
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == status
        assert ("step 4 of 100" in answer.read().decode()) == (status == 200)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_the_page_follows_the_run(tmp_path: Path) -> None:
    folder = going(tmp_path)
    with served_page(folder, 0, 0.2) as address, Browser() as browser:
        tab = browser.open(address)
        assert "4 steps are done" in tab.ask("document.querySelector('.verdict').textContent")
        shown_now = tab.ask("document.querySelector('main').textContent")
        assert "step 4 of 100" in shown_now
        assert "1.00 MiB" in shown_now, "memory of each rank"
        run = run_of()
        for trace in run.traces:
            so_far = msgspec.structs.replace(trace, steps=(), plan=run.plan.hash)
            so_far.save(folder.live / f"sample-{trace.rank:05d}.json")
        with folder.metrics.open("a") as file:
            file.write(json.dumps({"step": 4, "loss": 4.0, "seconds": 0.1, "tokens_per_second": 9.0}) + "\n")
        tab.until("document.querySelector('.verdict').textContent.includes('5 steps are done')")
        tab.until("document.querySelectorAll('#run-0-memory option').length === 2")
        assert "memory peaked at" in tab.ask("document.querySelector('.verdict').textContent")
        trace = run_of().worst
        assert trace is not None
        trace.save(folder.trace)
        tab.until("document.documentElement.dataset.live === 'ended'")
        assert "ran 20 steps" in tab.ask("document.querySelector('.verdict').textContent")
        assert tab.complaints == []
