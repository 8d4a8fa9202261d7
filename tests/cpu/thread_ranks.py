"""Ranks as threads of one process, which really exchange their tensors: thousands of small cases run in seconds.

Only the calls of torch.distributed that runtime/split/collectives.py makes are replaced; what it does around them runs as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.runtime.split import collectives
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.splitter import NotSplit

PATIENCE = 20.0
"""Seconds until a rank that waits for one that does not come gives up."""


class Meeting:
    """Where the ranks of one group put what they send.

    turn: held by the rank that runs, and handed on while it waits for others. Threads that draw random numbers side by side can
    wait for each other for ever: a kernel holds the lock of torch's generator and asks for the interpreter to free a tensor, while
    another thread holds the interpreter and waits for that lock to set the generator's state (seen)."""

    def __init__(self, size: int, turn: threading.Lock) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.given: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size
        self.turn = turn

    def wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class Seat:
    """A rank's place in a group."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def exchange(self, kind: str, tensor: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """What `read` makes of the tensors of all ranks."""
        self.meeting.given[self.rank] = (kind, tensor)
        self.meeting.wait()
        kinds = {(kind, tensor.shape, tensor.dtype) for kind, tensor in self.meeting.given}
        made = read([tensor for _, tensor in self.meeting.given])
        self.meeting.wait()
        assert len(kinds) == 1, f"ranks do different things: {kinds}"
        return made


def _all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Seat) -> None:
    def read(given: list[Tensor]) -> Tensor:
        stacked = torch.stack(given)
        return stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0).to(tensor.dtype)

    tensor.copy_(group.exchange(f"all-reduce {op}", tensor, read))


def _gather_into(output: Tensor, tensor: Tensor, *, group: Seat) -> None:
    output.copy_(group.exchange("all-gather", tensor, torch.cat))


def _scatter_into(output: Tensor, tensor: Tensor, *, group: Seat) -> None:
    def read(given: list[Tensor]) -> Tensor:
        return torch.stack(given).sum(0).chunk(len(given))[group.rank]

    output.copy_(group.exchange("reduce-scatter", tensor, read))


def _all_to_all(output: Tensor, tensor: Tensor, *, group: Seat) -> None:
    output.copy_(
        group.exchange("all-to-all", tensor, lambda given: torch.cat([t.chunk(len(given))[group.rank] for t in given]))
    )


def _pass_on(calls: list[Any]) -> list[Any]:
    """A send to the next rank and a receive from the one before."""
    (_, leaving, _, seat), (_, landing, _, _) = calls
    landing.copy_(seat.exchange("pass on", leaving, lambda given: given[seat.rank - 1].clone()))
    return []


@contextmanager
def threads_for_ranks() -> Iterator[None]:
    """While this lasts, the groups of Ranks are Seats."""
    before = collectives.dist, collectives.gather_into, collectives.scatter_into
    collectives.dist = SimpleNamespace(  # type: ignore[attr-defined]
        ReduceOp=dist.ReduceOp, all_reduce=_all_reduce, all_to_all_single=_all_to_all, batch_isend_irecv=_pass_on,
        P2POp=lambda *call: call, isend="send", irecv="receive", get_backend=lambda group: "gloo",
        get_process_group_ranks=lambda group: list(range(len(group.meeting.given))),
    )  # fmt: skip
    collectives.gather_into, collectives.scatter_into = _gather_into, _scatter_into
    try:
        yield
    finally:
        collectives.dist, collectives.gather_into, collectives.scatter_into = before  # type: ignore[attr-defined]


def on_every_rank(degrees: dict[Axis, int], folded: bool, work: Callable[[list[Ranks]], Any]) -> list[Any]:
    """What each rank's work gives, or the exception it ends in."""
    axes = list(degrees)
    places = [()]  # type: ignore[var-annotated]
    for axis in axes:
        places = [(*place, n) for place in places for n in range(degrees[axis])]
    meetings: dict[Any, Meeting] = {}
    turn = threading.Lock()
    found: list[Any] = [None] * len(places)

    def seat(place: tuple[int, ...], number: int) -> Seat:
        key = (number, *place[:number], *place[number + 1 :])
        return Seat(meetings.setdefault(key, Meeting(degrees[axes[number]], turn)), place[number])

    worlds = [
        [Ranks(axis, degrees[axis], place[n], seat(place, n), folded and axis == "cp") for n, axis in enumerate(axes)]  # type: ignore[arg-type]
        for place in places
    ]

    def run(number: int) -> None:
        with turn:
            work_of(number)

    def work_of(number: int) -> None:
        try:
            found[number] = work(worlds[number])
        except NotSplit as error:
            found[number] = error  # which all ranks must find: others do not hear of it
        except Exception as error:
            found[number] = error
            for meeting in meetings.values():
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
