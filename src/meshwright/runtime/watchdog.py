"""A Watchdog: a thread beside every rank that ends a run in which a rank hangs, and says which, where, and who waits for it.

    every tick      has this rank waited in one collective for `timeout` seconds? Has another rank said that it has?
    then            each rank leaves in the job's store where it stands; the one that spoke first puts the words together
    then            each rank ends with these words

The ranks that wait in no collective are the ones that hang. Where all wait, they wait in different ones, and the message shows
which. A rank that does not answer is stopped, cut off, or holds the interpreter in native code. A rank that cannot reach the
store is the one that is cut off, and ends by itself. torch's own time limits are set longer, so that they do not end the run
first with less to say.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from meshwright.core.errors import HangError
from meshwright.core.run.fault import Fault
from meshwright.runtime._torch_distributed import pending_collectives, set_group_timeouts
from meshwright.runtime.hang_report import compose, culprits_of, silent_ranks, write_report
from meshwright.runtime.messages.form import MessageError
from meshwright.runtime.messages.seal import seal, unseal
from meshwright.runtime.stacks import answer_signals, own_machine, stacks_of
from meshwright.runtime.standing import (
    Standing,
    current_step,
    is_wait,
    last_collective,
    main_frame,
    seconds_pending,
    standing,
)

TIMEOUT_SECONDS = 600.0
"""Where nobody says."""
LONGEST_TICK_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""For every rank to say where it stands; less where the time limit is."""
STORE_SECONDS = 30.0
SILENCE_SECONDS = 5.0
"""Without a word from the store, past two ticks: it cannot be reached."""
SPEAK_SECONDS = 10.0
"""To ask whether another rank has spoken: one that is cut off speaks after that."""
LATER = timedelta(minutes=10)
"""By so much torch's own time limits come after ours."""
BUFFER_SIZE = "128"
"""Collectives torch keeps in mind."""
FAULT_SECONDS = 30.0
"""For the rank that puts together what all say: it reads stacks and writes a report."""
KEY = "meshwright/watchdog"
FORGED = "a rank hangs, and what others left in the job's store is not of this job: another process writes into it"


class Watchdog:
    """Watches this process from `start` to `stop`. `bark` is called with the error, from the watchdog's thread.

    attempt: a name that ranks of this start of the job share, and no other: the store may outlive them.
    report: where the stacks of all ranks go, if anywhere.
    """

    def __init__(
        self, rank: int, num_ranks: int, timeout_seconds: float, bark: Callable[[HangError], Any], attempt: str,
        report: Path | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.num_ranks, self.timeout_seconds, self.bark = rank, num_ranks, timeout_seconds, bark
        self.key, self.report = f"{KEY}/{attempt}", report
        self._ended, self._strikes = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-watchdog", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="meshwright-watchdog-listener", daemon=True)
        self._told = threading.Event()
        self._heard = time.monotonic()
        self._lengthened: set[str] = set()
        self._spot: tuple[int, int] | None = None
        self._since: float | None = None

    @property
    def tick_seconds(self) -> float:
        return min(LONGEST_TICK_SECONDS, self.timeout_seconds / 5)

    @property
    def answer_seconds(self) -> float:
        return min(ANSWER_SECONDS, self.timeout_seconds / 2) + self.tick_seconds

    def start(self) -> None:
        self._store = open_store(min(STORE_SECONDS, max(1.0, self.timeout_seconds)))
        stacks = answer_signals()
        self._leave(f"process/{self.rank}", f"{own_machine()} {os.getpid()} {stacks or -1}")
        self._lengthen()
        self._heard = time.monotonic()
        self._thread.start()
        self._listener.start()

    def speak_first(self) -> None:
        """After an error: where the watchdog is about to say which rank hangs, the error came of that, since a rank that does not
        answer is killed, and its peers lose it. Then this does not return: the process ends with the watchdog's words."""
        if self._strikes.is_set():
            self._thread.join(timeout=self.answer_seconds + FAULT_SECONDS)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        """A thread of its own: over a link that is cut the store does not answer, and no time limit of torch's ends the wait."""
        with suppress(dist.DistError):  # the store is gone: so is the job, or the way to it
            while not self._ended.wait(self.tick_seconds):
                if self._store.check([f"{self.key}/struck"]):
                    self._told.set()
                    return
                self._heard = time.monotonic()

    def _run(self) -> None:
        with suppress(dist.DistError):
            while not self._pause():
                self._lengthen()
                has_waited = self._waited_seconds() > self.timeout_seconds
                silence_seconds = time.monotonic() - self._heard
                if self._told.is_set() or (has_waited and silence_seconds < 2 * self.tick_seconds):
                    self._strike()
                    return
                if (
                    has_waited
                    and silence_seconds > SILENCE_SECONDS + 2 * self.tick_seconds
                    and not self._ended.is_set()
                ):
                    self.bark(self._cut_off())

    def _pause(self) -> bool:
        """One tick; returns whether the watch has ended. What this process did not hear while it was stopped or got no core is not
        the store's silence: a stopped rank is continued for a moment, for its stacks."""
        before = time.monotonic()
        has_ended = self._ended.wait(self.tick_seconds)
        now = time.monotonic()
        self._heard = min(now, self._heard + max(0.0, now - before - self.tick_seconds))
        return has_ended

    def _lengthen(self) -> None:
        set_group_timeouts(timedelta(seconds=self.timeout_seconds) + LATER, self._lengthened)

    def _waited_seconds(self) -> float:
        """How long this rank has been in one and the same wait."""
        frame = main_frame()
        spot = (id(frame), frame.f_lasti) if is_wait(frame) else None
        if spot is None or spot != self._spot:
            self._spot, self._since = spot, time.monotonic() if spot else None
        on_stack = time.monotonic() - self._since if self._since is not None else 0.0
        return max((seconds_pending(entry) for entry in pending_collectives()), default=on_stack)

    def _strike(self) -> None:
        self._strikes.set()
        self._leave(f"rank/{self.rank}", standing().to_json())
        if self._store.add(f"{self.key}/struck", 1) == 1:
            self._leave("fault", self._find_fault().to_json())
        self._store.wait([f"{self.key}/fault"], timedelta(seconds=self.answer_seconds + FAULT_SECONDS))
        found = self._found("fault")
        if not self._ended.is_set():
            self.bark(HangError(FORGED) if found is None else _as_error(Fault.from_json(found)))

    def _find_fault(self) -> Fault:
        """Put together what the ranks say, and leave it in the report. Ranks that said nothing are ended."""
        answers = self._answers()
        words = compose(answers, self.num_ranks, self.timeout_seconds)
        processes = {rank: self._process(rank) for rank in silent_ranks(answers, self.num_ranks)}
        if self.report is not None:
            stacks = {rank: stacks_of(*found[1:]) if found else "" for rank, found in processes.items()}
            words = self._reported(self.report, words, answers, stacks)
        for found in processes.values():
            if found is not None:
                with suppress(ProcessLookupError):
                    os.kill(
                        found[1], signal.SIGKILL
                    )  # it cannot end itself; the launcher would wait for it for minutes
        culprits = culprits_of(answers, self.num_ranks)
        fault = Fault(
            kind="hung",
            ranks=tuple(culprits),
            num_ranks=self.num_ranks,
            host=answers[culprits[0]].host if culprits[0] in answers else self._host(culprits[0]),
            step=max((answer.step for answer in answers.values() if answer.step is not None), default=None),
            collective=next((answer.waits_in for answer in answers.values() if answer.waits_in is not None), None),
            words=words,
        )
        return msgspec.structs.replace(fault, words=f"{words}\n  {fault.place}")

    def _reported(self, file: Path, words: str, answers: dict[int, Standing], stacks: dict[int, str]) -> str:
        """The words, with where there is more."""
        try:
            write_report(file, words, answers, stacks)
        except OSError as error:
            return f"{words}\n  the stacks of all ranks could not be written to {file}: {error.strerror}"
        return f"{words}\n  the stacks of all ranks, and the collective that differs, are in {file}"

    def _answers(self) -> dict[int, Standing]:
        """Where the ranks stand, as far as they say so in time."""
        found: dict[int, Standing] = {}
        deadline = time.monotonic() + self.answer_seconds
        while len(found) < self.num_ranks and time.monotonic() < deadline:
            for rank in set(range(self.num_ranks)) - set(found):
                if (said := self._found(f"rank/{rank}")) is not None:
                    found[rank] = Standing.from_json(said)
            time.sleep(0.05)
        return found

    def _process(self, rank: int) -> tuple[str, int, int] | None:
        """Its host, process and the descriptor of its stacks, where this process can reach it."""
        found = self._note(rank)
        return (found[0], int(found[1]), int(found[2])) if found and found[0] == own_machine() else None

    def _host(self, rank: int) -> str:
        found = self._note(rank)
        return found[0].partition(",")[0] if found else "unknown"

    def _note(self, rank: int) -> list[str] | None:
        found = self._found(f"process/{rank}")
        return found.decode().rsplit(maxsplit=2) if found is not None else None

    def _leave(self, name: str, text: str) -> None:
        """For the other ranks. Every process of the machine can write into the store, and one that is named there may be ended."""
        self._store.set(f"{self.key}/{name}", seal(f"{self.key}/{name}", text.encode()))

    def _found(self, name: str) -> bytes | None:
        """What another rank has left; None where it has left nothing, or what is there is not of this job."""
        key = f"{self.key}/{name}"
        try:
            return unseal(key, self._store.get(key)) if self._store.check([key]) else None
        except MessageError:
            return None

    def _cut_off(self) -> HangError:
        collective = last_collective()
        words = (
            f"rank {self.rank} of {self.num_ranks} has waited for {self.timeout_seconds:g} s in {collective or 'no collective'} "
            f"and cannot reach the job's store at {os.environ['MASTER_ADDR']}: its link is cut, or that host is gone"
        )
        fault = Fault(
            kind="lost", ranks=(self.rank,), num_ranks=self.num_ranks, host=socket.gethostname(), step=current_step(),
            collective=collective, words=words,
        )  # fmt: skip
        return HangError(words, fault)


def _as_error(fault: Fault) -> HangError:
    return HangError(fault.words, fault)


def open_store(timeout_seconds: float = STORE_SECONDS) -> Any:
    """A connection of one's own to the job's store: the process group's is busy while a rank waits on it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))


def is_first_to_say() -> bool:
    """Whether no other rank of the job has said yet why it ends. Ranks that cannot ask each other speak."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return bool(open_store(SPEAK_SECONDS).add(f"{KEY}/said/{attempt}", 1) == 1)
    except (KeyError, RuntimeError):
        return True


def remember_collectives() -> None:
    """Before the process group is made: torch keeps the last collectives in mind, so that it can say which is not done."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", BUFFER_SIZE)
