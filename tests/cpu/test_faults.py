"""Ranks that are killed, stopped, fail or lose their link: the run says what happened, goes on, and ends as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
from cases import ASSETS
from command import PATIENCE_SECONDS, Cli, Started, has_saved, losses, wait_for
from forked import forked_on_host
from hosts import INTERFACE, Hosts, call, two_hosts
from hosts import why_not as hosts_missing
from injection import alive, children, drafts, inject, ranks_of, shared_memory, why_not

from meshwright.core.plan import Plan
from meshwright.core.run.fault import Fault
from meshwright.runtime import standing
from meshwright.runtime.hang_report import differences
from meshwright.runtime.rank import without_chatter
from meshwright.runtime.standing import Call, Standing
from meshwright.runtime.template import Template
from meshwright.training.checkpoint import latest

STEPS = 70
MANY = 20
"""Restarts: more than a busy machine uses up."""
RUN: dict[str, Any] = {
    "model": f"{ASSETS}/faulty.py:told", "steps": STEPS, "timeout": 60.0, "checkpoint": {"every": 5},
}  # fmt: skip
IMPATIENT = {**RUN, "timeout": 5.0}
"""Where a rank is to hang. On a busy machine one that gets no core for so long counts as one that hangs, too."""
SAID = {
    "kill": "was killed from outside (SIGKILL",
    "stop": "rank 1 of 2 hangs: others have waited for 5 s",
    "raise": "rank 1 of 2 failed: ArithmeticError: the gears slipped",
    "cut": "lost the connection to another rank",
}
KINDS = {"kill": "killed", "stop": "hung", "raise": "raised", "cut": "lost"}


def num_lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def past_a_checkpoint(folder: Path, run: Started, steps: int = 7) -> None:
    """Until the ranks of this moment have trained a while, and a checkpoint is written: that goes on beside the training."""
    before = num_lines(folder)
    wait_for(lambda: num_lines(folder) >= before + steps and len(ranks_of(run.process.pid)) > 0, run)
    wait_for(lambda: has_saved(folder), run)


def put_upon(kind: str, run: Started) -> None:
    """One fault on rank 1; returns when its ranks are gone."""
    ranks = ranks_of(run.process.pid)
    assert inject(kind, 1, ranks)
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in ranks.values()), run)


def is_written(file: Path) -> bool:
    return file.exists() and "Rank 1 (it did not answer)" in file.read_text()


def faults_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]


def test_every_kind_of_fault(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    """One after another upon one run; its losses are those of a run that nothing happened to."""
    kinds = [kind for kind in SAID if not why_not(kind)]
    file = settings(**IMPATIENT)
    assert cli("train", file, "--out", "whole").code == 0
    memory, folder = shared_memory(), tmp_path / "run"
    run = start("train", file, "--restarts", MANY, "--json")
    for kind in kinds:
        past_a_checkpoint(folder, run)
        put_upon(kind, run)
        if kind == "stop":  # a rank that is not told of a later cut may write another
            wait_for(lambda: is_written(folder / "hang.txt"), run)  # by the launcher, once the ranks are gone
            report = (folder / "hang.txt").read_text()
    ended = run.end()
    assert ended.code == 0, ended.err
    assert losses(folder) == losses(tmp_path / "whole")
    noted = faults_of(folder)
    assert ended.json["restarts"] == len(noted)
    left = iter(noted)
    found = [next(fault for fault in left if SAID[kind] in fault["words"]) for kind in kinds]
    assert [fault["kind"] for fault in found] == [KINDS[kind] for kind in kinds]
    assert {fault["kind"] for fault in noted if fault not in found} <= {"hung"}, "what nobody put upon it"
    for fault in found:
        assert fault["host"] == socket.gethostname()
        assert fault["resumed_step"] <= fault["step"] <= STEPS
        assert " over dp, " in fault["collective"]
        assert f"host {fault['host']}, step {fault['step']}, last collective: {fault['collective']}" in fault["words"]
    assert f"restart 1 of {MANY}: 2 ranks go on from step" in ended.err
    assert (drafts(folder / "checkpoints"), shared_memory() - memory) == ([], set())
    if "stop" in kinds:
        assert f"are in {folder}/hang.txt" in ended.err.replace("\n", "")
        assert "Rank 0 (host" in report
        assert "Rank 1 (it did not answer)" in report
        assert "training/loop.py" in report.partition("Rank 1")[2], "the stack of the rank that was stopped is missing"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_plain_processes_take_over_where_the_template_is_lost(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path, number: int
) -> None:
    """Killed together with a rank; or stopped, so that it does not answer."""
    file = settings(**RUN)
    changes = (
        "import meshwright.runtime.template as t",
        "t.ANSWER_SECONDS = 0.5",
        "from meshwright.cli import main",
        "main()",
    )
    run = start("train", file, "--restarts", 2, launcher=("-c", "; ".join(changes)))
    past_a_checkpoint(tmp_path / "run", run)
    ranks = ranks_of(run.process.pid)
    (template,) = set(children(run.process.pid)) - set(ranks.values())
    os.kill(template, number)
    put_upon("kill", run)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert "restart 1 of 2: 2 ranks go on from step" in ended.out
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(STEPS))
    assert not alive(template)


def test_a_frame_that_stands_on_no_line() -> None:
    """As another thread's does for a moment: the watchdog that looks at it goes on, and names the function."""

    def here() -> FrameType:
        return sys._getframe()

    code = here.__code__.replace(co_linetable=b"", co_filename=standing.__file__)
    frame = FunctionType(code, globals())()
    assert frame.f_lineno is None
    assert not standing.is_wait(frame)
    assert f"{standing.__file__}:{code.co_firstlineno} in here" in standing.line_of(frame)


BETWEEN = """
import os, signal
import meshwright.jobs.restarting as restarting
from meshwright.cli import main

noted = restarting.note
def note(*arguments):
    noted(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
restarting.note = note
main()
"""
"""SIGTERM comes when the ranks of one attempt have ended, and those of the next are not there yet."""


def test_a_signal_between_two_attempts(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    run = start("train", settings(**RUN), "--restarts", 2, launcher=("-c", BETWEEN))
    past_a_checkpoint(tmp_path / "run", run)
    put_upon("kill", run)
    ended = run.end()
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run/run.lock").exists()


def test_a_rank_that_is_killed_while_a_checkpoint_is_planned(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    """The fault is the rank's, not the checkpoint's: no word about a checkpoint that was not written, nor what gloo says."""
    run = start("train", settings(**{**RUN, "model": f"{ASSETS}/faulty.py:dies_in_a_save"}))
    ended = run.end()
    assert ended.code == 1
    assert "error: rank 1 of 2 was killed from outside (SIGKILL" in ended.err
    assert "warning" not in ended.out
    assert "gloo" not in ended.out + ended.err


def test_fewer_ranks_go_on(start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path) -> None:
    """The plan said dp 2; for the one rank that is left there is another, of the same global batch."""
    file = settings(**RUN, plan={"global_batch": 8, "dp": 2})
    run = start("train", file, "--restarts", 2, "--fewer-ranks")
    past_a_checkpoint(tmp_path / "run", run)
    put_upon("kill", run)
    ended = run.end()
    assert ended.code == 0, ended.err
    (fault,) = faults_of(tmp_path / "run")
    assert (fault["num_ranks"], fault["resumed_ranks"]) == (2, 1)
    assert "1 rank goes on from step" in ended.out
    plan = Plan.load(tmp_path / "run/plan.json")
    assert (plan.world, plan.global_batch) == (1, 8)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(STEPS))


def test_restarts_are_used_up_and_errors_that_come_back_are_not_tried_again(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    ended = cli("train", settings(model=f"{ASSETS}/models.py:fails_late"), "--restarts", 5)
    assert ended.code == 1
    assert ended.out.count("restart ") == 1, ended.out
    assert "the same error came back after a restart: it is not restarted again" in ended.err
    wrong = settings(steps=20, optimizer={"kind": "SGD"}, learning_rate={"peak": 1e30, "warmup_steps": 0})
    ended = cli("train", wrong, "--restarts", 5)
    assert ended.code == 1
    assert "restart " not in ended.out, "to start again does not help a loss that is not finite"


def torchrun(address: str, port: int, is_host: int, *more: str, hosts: str = "1:2") -> tuple[str, ...]:
    """The command before `train`: one rank, as one of so many hosts. is_host: whether the ranks meet here."""
    patience = f"is_host={is_host},last_call_timeout=3"
    return (
        "-m", "torch.distributed.run", "--nnodes", hosts, "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-id", "job",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}", "--rdzv-conf", patience,
        "--monitor-interval", "0.2", *more, "-m", "meshwright",
    )  # fmt: skip


def test_a_host_is_lost_under_torchrun(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    """One agent per rank; one agent and its rank are killed outright. The other is started again alone and goes on."""
    file = settings(**RUN)
    file.write_text(file.read_text().replace("nproc = 2\n", ""))
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    first, second = (start("train", file, launcher=torchrun("localhost", port, is_host)) for is_host in (1, 0))
    past_a_checkpoint(tmp_path / "run", first)
    first_ranks, second_ranks = ranks_of(first.process.pid), ranks_of(second.process.pid)
    assert {*first_ranks, *second_ranks} == {0, 1}
    os.kill(second.process.pid, signal.SIGKILL)
    os.kill(next(iter(second_ranks.values())), signal.SIGKILL)
    second.process.communicate()
    ended = first.end()
    assert ended.code == 0, ended.err
    assert "started again by the launcher: 1 ranks go on from step" in ended.out
    assert Plan.load(tmp_path / "run/plan.json").world == 1
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(STEPS))
    newest = latest(tmp_path / "run/checkpoints")
    assert newest is not None
    assert newest.name == f"step-{STEPS:08d}"


@pytest.mark.skipif(bool(hosts_missing()), reason=hosts_missing())
def test_a_link_between_hosts_is_cut_and_restored(
    settings: Callable[..., Path], template: Template, tmp_path: Path
) -> None:
    """Packets vanish, nothing is closed: both sides notice by the time limit, each for itself, and go on when the link is back."""
    file = settings(**IMPATIENT)
    file.write_text(file.read_text().replace("nproc = 2\n", ""))
    with two_hosts(spawn=forked_on_host(template)) as hosts, contextlib.ExitStack() as files:
        for number, host in enumerate(hosts.hosts):
            address = ("--local-addr", host.address)
            command = [
                sys.executable,
                *torchrun(hosts.hosts[0].address, 29400, int(number == 0), *address, hosts="2"),
                "train",
                str(file),
            ]
            hosts.start(number, command, output=files.enter_context((tmp_path / f"host{number}.log").open("wb")))
        patient(lambda: num_lines(tmp_path / "run") >= 8, hosts)
        ranks = [process for one in hosts.processes for process in ranks_of(one.pid).values()]
        assert len(ranks) == 2
        call("ip", "-n", hosts.hosts[1].name, "link", "set", INTERFACE, "down")
        patient(lambda: not any(map(alive, ranks)), hosts)
        call("ip", "-n", hosts.hosts[1].name, "link", "set", INTERFACE, "up")
        patient(lambda: all(process.poll() is not None for process in hosts.processes), hosts)
    logs = [(tmp_path / f"host{number}.log").read_text() for number in range(2)]
    assert "rank 1 does not answer: it is stopped, in native code that holds Python, or cut off" in logs[0]
    assert "cannot reach the job's store" in logs[1]
    assert "started again by the launcher: 2 ranks go on from step" in logs[0]
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(STEPS))


def patient(condition: Callable[[], bool], hosts: Hosts) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_ranks_end_with_their_launcher(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    """Also one that is stopped: it sees no signal but SIGKILL."""
    run = start("train", settings(**{**RUN, "steps": 5000}))
    past_a_checkpoint(tmp_path / "run", run)
    ranks = ranks_of(run.process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(alive, ranks.values())):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.1)


def test_fewer_ranks_without_restarts_is_refused(here: Cli, settings: Callable[..., Path]) -> None:
    ended = here("train", settings(), "--fewer-ranks")
    assert ended.code == 2
    assert "but it has no restarts: add --restarts N" in ended.err


# Values.


def test_the_collective_that_differs() -> None:
    """Numbers that one rank has forgotten are not compared; sizes count where every rank gives as much."""

    def call(number: int, kind: str = "all_reduce", words: str = "all_reduce over dp, 4 B") -> Call:
        return Call(group="0/dp", number=number, kind=kind, over="dp", words=words)

    def standing(*calls: Call) -> Standing:
        return Standing(line="", waits_in=None, calls=calls)

    assert differences({0: standing(call(1), call(2)), 1: standing(call(2))}) == []
    lacks = differences({0: standing(call(1), call(2)), 1: standing(call(1))})
    assert lacks == ["collective number 2 over dp:", "  rank 0: all_reduce over dp, 4 B", "  rank 1: has not called it"]
    sizes = differences({0: standing(call(1)), 1: standing(call(1, words="all_reduce over dp, 8 B"))})
    assert sizes[2] == "  rank 1: all_reduce over dp, 8 B"
    uneven = call(1, "all_to_all", "all_to_all over ep, 4 B"), call(1, "all_to_all", "all_to_all over ep, 8 B")
    assert differences({0: standing(uneven[0]), 1: standing(uneven[1])}) == []


def test_what_gloo_adds_to_its_errors_is_left_out() -> None:
    words = (
        "[/a/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:13491: Connection reset by peer. This is "
        "typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote worker before "
        "reporting an error. GLHF! 🏖️"
    )
    assert without_chatter(words) == "Read error [127.0.0.1]:13491: Connection reset by peer."
    assert without_chatter("all is well [/a/b] here") == "all is well [/a/b] here"


@pytest.mark.parametrize(("kind", "may_pass"), [("killed", True), ("lost", True), ("raised", True), ("refused", False)])
def test_what_may_pass(kind: Any, may_pass: bool) -> None:
    fault = Fault(kind=kind, ranks=(1,), num_ranks=2, host="h", step=3, words="boom\nline 7")
    assert fault.may_pass is may_pass
    assert fault.is_again(fault) is (kind == "raised")
    assert fault.place == "host h, step 3, no collective yet"
