"""A Watchdog: a thread beside every rank that ends a run in which a rank hangs, and says which, where, and who waits for it.

    every tick      has this rank waited in one collective for `timeout` seconds? Has another rank said that it has?
    then            each rank leaves in the job's store where it stands; the one that spoke first puts the words together
    then            each rank ends with these words

The ranks that wait in no collective are the ones that hang. Where all wait, they wait in different ones, and the message shows
which. A rank that does not answer is stopped, or holds the interpreter in native code. torch's own time limits are set longer,
so that they do not end the run first with less to say.
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
from itertools import groupby
from typing import Any

import torch.distributed as dist

from meshwright.core.errors import HangError
from meshwright.runtime._torch_distributed import pending_collectives, set_group_timeouts
from meshwright.runtime.standing import Standing, is_wait, main_frame, seconds_pending, standing

TIMEOUT_SECONDS = 600.0
"""Where nobody says."""
LONGEST_TICK_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""For every rank to say where it stands."""
LATER = timedelta(minutes=10)
"""By so much torch's own time limits come after ours."""
BUFFER_SIZE = "128"
"""Collectives torch keeps in mind."""
KEY = "meshwright/watchdog"


class Watchdog:
    """Watches this process from `start` to `stop`. `bark` is called with the error, from the watchdog's thread."""

    def __init__(self, rank: int, num_ranks: int, timeout_seconds: float, bark: Callable[[HangError], Any]) -> None:
        self.rank, self.num_ranks, self.timeout_seconds, self.bark = rank, num_ranks, timeout_seconds, bark
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshwright-watchdog", daemon=True)
        self._lengthened: set[str] = set()
        self._spot: tuple[int, int] | None = None
        self._since: float | None = None

    @property
    def tick_seconds(self) -> float:
        return min(LONGEST_TICK_SECONDS, self.timeout_seconds / 5)

    def start(self) -> None:
        self._store = open_store()
        self._store.set(f"{KEY}/process/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self._lengthen()
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with suppress(dist.DistError):  # the store is gone: so is the job
            while not self._ended.wait(self.tick_seconds):
                self._lengthen()
                if self._store.check([f"{KEY}/struck"]) or self._waited_seconds() > self.timeout_seconds:
                    self._strike()
                    return

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
        self._store.set(f"{KEY}/rank/{self.rank}", standing().to_json())
        if self._store.add(f"{KEY}/struck", 1) == 1:
            answers = self._answers()
            self._store.set(f"{KEY}/words", compose(answers, self.num_ranks, self.timeout_seconds))
            self._end_silent(set(range(self.num_ranks)) - set(answers))
        self._store.wait([f"{KEY}/words"], timedelta(seconds=ANSWER_SECONDS + self.tick_seconds + 10))
        said = self._store.get(f"{KEY}/words").decode()
        if not self._ended.is_set():
            self.bark(HangError(said))

    def _answers(self) -> dict[int, Standing]:
        """Where the ranks stand, as far as they say so in time."""
        found: dict[int, Standing] = {}
        deadline = time.monotonic() + ANSWER_SECONDS + self.tick_seconds
        while len(found) < self.num_ranks and time.monotonic() < deadline:
            for rank in set(range(self.num_ranks)) - set(found):
                if self._store.check([f"{KEY}/rank/{rank}"]):
                    found[rank] = Standing.from_json(self._store.get(f"{KEY}/rank/{rank}"))
            time.sleep(0.05)
        return found

    def _end_silent(self, ranks: set[int]) -> None:
        """A rank that cannot answer cannot end itself either; the launcher would wait for it for minutes."""
        for rank in ranks:
            if self._store.check([f"{KEY}/process/{rank}"]):
                host, process = self._store.get(f"{KEY}/process/{rank}").decode().rsplit(maxsplit=1)
                if host == socket.gethostname():
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)


def compose(answers: dict[int, Standing], num_ranks: int, timeout_seconds: float) -> str:
    """Who hangs and where, who waits for it and in what."""
    silent = [rank for rank in range(num_ranks) if rank not in answers]
    hanging = {rank: answer for rank, answer in answers.items() if answer.waits_in is None}
    waiting = {rank: answer for rank, answer in answers.items() if answer.waits_in is not None}
    culprits = sorted([*silent, *hanging])
    verb = "hangs" if len(culprits) == 1 else "hang"
    head = (
        f"{_ranks(culprits)} of {num_ranks} {verb}: others have waited for {timeout_seconds:g} s"
        if culprits
        else f"all {num_ranks} ranks have waited for {timeout_seconds:g} s, in different collectives: their paths parted"
    )
    lines = [head]
    lines += [f"  rank {rank} does not answer: it is stopped, or in native code that holds Python" for rank in silent]
    lines += [f"  rank {rank} stands at {answer.line}" for rank, answer in hanging.items()]
    together = sorted(waiting.items(), key=lambda item: (item[1].waits_in, item[1].line, item[0]))
    for (waits_in, line), group in groupby(together, key=lambda item: (item[1].waits_in, item[1].line)):
        members = [rank for rank, _ in group]
        lines.append(f"  {_ranks(members)} {'waits' if len(members) == 1 else 'wait'} in {waits_in}, at {line}")
    return "\n".join(
        [*lines, "  give more time with --timeout SECONDS (0: no limit) if the work there takes that long"]
    )


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def open_store() -> Any:
    """A connection of one's own to the job's store: the process group's is busy while a rank waits on it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))


def is_first_to_say() -> bool:
    """Whether no other rank of the job has said yet why it ends. Ranks that cannot ask each other speak."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return bool(open_store().add(f"{KEY}/said/{attempt}", 1) == 1)
    except (KeyError, RuntimeError):
        return True


def remember_collectives() -> None:
    """Before the process group is made: torch keeps the last collectives in mind, so that it can say which is not done."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", BUFFER_SIZE)
