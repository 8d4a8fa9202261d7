"""Start local ranks, and say in words how they ended.

Each rank is a process of its own that runs `meshwright.runtime.rank`, which calls one function with one payload. What rank 0's
function returns comes back here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from meshwright.core.codec import decode
from meshwright.core.errors import (
    FailsUnderPlanError,
    HangError,
    InputError,
    OutOfMemoryError,
    RefusedError,
    RunError,
    check_number,
)
from meshwright.core.run.fault import Fault
from meshwright.core.units import format_bytes
from meshwright.runtime.affinity import local_cores
from meshwright.runtime.local_ranks import LocalRanks, heeding_signals
from meshwright.runtime.stopped import StoppedRanks
from meshwright.runtime.temporary import temporary_folder

RESULT_BYTES = 4096
"""Taken for the result before ranks start: a run that is done must not fail for want of a few bytes."""
RANKS_PER_CORE = 16
"""More ranks than this on one core are taken for a slip of the hand."""


def check_num_ranks(num_ranks: int) -> None:
    """More ranks than this machine can hold are refused before anything starts."""
    most = RANKS_PER_CORE * len(local_cores())
    check_number("--nproc", num_ranks)
    if num_ranks > most:
        raise InputError(
            f"--nproc {num_ranks}: this machine has {len(local_cores())} cores; run at most {most} ranks on it"
        )


class Interrupted(KeyboardInterrupt):
    """The ranks were told to stop. `result` is what rank 0 returned, if it came to its end in good order."""

    def __init__(self, result: Any) -> None:
        super().__init__("interrupted")
        self.result = result


@contextmanager
def stoppable() -> Iterator[None]:
    """A signal that would end this process while it has no ranks, before the first or between two attempts, is an Interrupted.

    While there are ranks, they are ended in good order (`local_ranks.py`).
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(None)

    with heeding_signals(stop):
        yield


def launch(function: str, payload: dict[str, Any], num_ranks: int, timeout_seconds: float = 0.0) -> Any:
    """Run `package.module:function` with the payload on every rank; returns what rank 0 returned.

    timeout_seconds: a rank that is stopped for longer is ended; 0: it is waited for.
    """
    check_num_ranks(num_ranks)
    with StoppedRanks(timeout_seconds), temporary_folder() as folder:
        payload_file, result_file = folder / "payload.json", folder / "result.json"
        try:
            payload_file.write_text(json.dumps(payload))
            result_file.write_bytes(b" " * RESULT_BYTES)
        except OSError as error:
            raise RunError(
                f"no rank can be started: {payload_file} cannot be written: {error.strerror}: make room there, or set TMPDIR"
            ) from error
        interrupted = _run_ranks([function, str(payload_file), str(result_file)], num_ranks, folder)
        text = result_file.read_text().strip() if result_file.exists() else ""
        result = json.loads(text) if text else None
    if interrupted:
        raise Interrupted(result)
    return result


def _run_ranks(arguments: list[str], num_ranks: int, reports: Path) -> bool:
    """Wait for all ranks to end; returns whether a signal ended them."""
    ranks = LocalRanks(arguments, num_ranks, reports)
    ranks.run()
    if ranks.failed and not ranks.num_signals:
        raise describe_failure(ranks.failed, num_ranks)
    return ranks.num_signals > 0


def quiet_launcher() -> None:
    """The loggers of torch's launcher repeat what we say better."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def describe_failure(failures: dict[int, Any], num_ranks: int) -> RunError:
    """The rank that failed first and why. A rank that was killed outright comes before those that then lost it.

    A hang comes before all: every rank was told of it, and one that did not answer was killed for it.
    """
    reports = {rank: _report_of(failure) for rank, failure in failures.items()}
    faults = {rank: fault for rank, report in reports.items() if (fault := _fault_in(report)) is not None}
    for rank in _misled(reports, faults):
        del reports[rank], faults[rank]
    hangs = [(report["message"], faults.get(rank)) for rank, report in reports.items() if report.get("hang")]
    if hangs:  # who has put together what all ranks say knows more than one that could not ask them
        return HangError(*min(hangs, key=lambda hang: hang[1] is None or hang[1].kind != "hung"))
    for rank, report in sorted(reports.items()):
        if report.get("out_of_memory"):
            return OutOfMemoryError(f"rank {rank} of {num_ranks}: {report['message']}")
    killed = {
        rank: failure
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    }
    if killed:
        rank, failure = min(killed.items())
        words = f"{_killed_by(-failure.exitcode, failure.pid)}. All ranks were stopped."
        return _error(_killed(tuple(sorted(killed)), num_ranks, faults), f"rank {rank} of {num_ranks} {words}")
    lost = {rank for rank, fault in faults.items() if fault.kind == "lost"}
    own = {rank: report for rank, report in reports.items() if rank not in lost and failures[rank].exitcode >= 0}
    rank, report = min((own or reports).items(), key=lambda item: item[1]["seconds"])
    fault = faults.get(rank) or _killed((rank,), num_ranks, faults)  # it ended without a word
    if fault.kind == "corrupt":  # every rank says whose fault it is
        return RunError(report["message"], fault)
    if fault.kind == "lost":
        words = f"{_list(sorted(lost))} of {num_ranks} lost the connection to another rank: {report['message']}"
        return _error(msgspec.structs.replace(fault, ranks=tuple(sorted(lost))), words)
    words = f"rank {rank} of {num_ranks} failed: {report['message']}"
    if report.get("refused"):
        return RefusedError(words, msgspec.structs.replace(fault, words=words))
    if report.get("fails_under_plan"):
        return FailsUnderPlanError(words, msgspec.structs.replace(fault, words=words))
    return _error(fault, words)


def _misled(reports: dict[int, dict[str, Any]], faults: dict[int, Fault]) -> list[int]:
    """Ranks that waited for one that had ended, and took it for hanging: that one has said itself why it ended.

    gloo does not always tell a rank that its peer is gone.
    """
    spoken = {rank for rank in faults if not reports[rank].get("hang")}
    return [rank for rank, fault in faults.items() if reports[rank].get("hang") and spoken.issuperset(fault.ranks)]


def _error(fault: Fault, words: str) -> RunError:
    """What Meshwright refuses on purpose speaks for itself; all else needs the place."""
    said = words if fault.kind == "refused" else f"{words}\n  {fault.place}"
    return RunError(said, msgspec.structs.replace(fault, words=said))


def _killed(ranks: tuple[int, ...], num_ranks: int, others: dict[int, Fault]) -> Fault:
    """A rank that was killed says nothing: step and collective are those in which the others lost it."""
    steps = [fault.step for fault in others.values() if fault.step is not None]
    calls = [fault.collective for fault in others.values() if fault.collective is not None]
    return Fault(
        kind="killed", ranks=ranks, num_ranks=num_ranks, host=socket.gethostname(), step=max(steps, default=None),
        collective=next(iter(calls), None), words="",
    )  # fmt: skip


def _list(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _fault_in(report: dict[str, Any]) -> Fault | None:
    return decode(report["fault"], Fault, "the rank's report") if "fault" in report else None


def _killed_by(number: int, pid: int) -> str:
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return f"was ended by {name} (process {pid})"
    return (
        f"was killed from outside ({name}, process {pid}); most often the host ran out of memory: {_memory_words()}. "
        "Use fewer ranks, a smaller microbatch, or ZeRO"
    )


def _memory_words() -> str:
    """Available memory, and how often the kernel has killed here for the lack of it."""
    words = [f"{format_bytes(os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))} are free now"]
    events = Path("/sys/fs/cgroup/memory.events")
    if events.exists():
        counts = dict(line.split() for line in events.read_text().splitlines())
        words.append(f"the kernel has killed {counts.get('oom_kill', '0')} processes of this group for memory")
    return ", ".join(words)


def _report_of(failure: Any) -> dict[str, Any]:
    """What the rank itself wrote down before it ended; its exit code where it had no time to."""
    try:
        return dict(json.loads(Path(failure.error_file).read_text())["message"]["extraInfo"])
    except (OSError, ValueError, KeyError, TypeError):
        words = f"it ended with exit code {failure.exitcode} and left no message; its last words are above"
        return {"seconds": float(failure.timestamp), "message": words}
