"""The thread that updates on the host: gradients that have landed, in the order in which the next forward needs them.

Copies to the host land in the order they were asked for. Of all that have landed, the first of the earliest step comes next;
sums over microbatches come before updates. Updates are taken several at a time, and the next ones of a step are begun before
the last are finished: between two calls the thread needs the interpreter, which the thread that drives the device is busy with.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakMethod

from meshwright.runtime.offload.link import Arrival

BATCH_ELEMENTS = 1 << 26
"""Updates taken at a time: a few milliseconds of work."""
PATIENCE_SECONDS = 1.0
"""How long who waits for the thread goes on without asking whether it is still alive."""


Begin: TypeAlias = "Callable[[list[Job]], Callable[[], None]]"


@dataclass(order=True)
class Job:
    """Smaller ones come first."""

    step: int
    is_update: bool
    place: int
    """Where in forward it is needed."""
    arrival: Arrival = field(compare=False)
    num_elements: int = field(compare=False)
    what: Any = field(compare=False)


class Updater:
    def __init__(self, begin: WeakMethod[Begin]) -> None:
        """begin: begins jobs of one kind and step; what it returns finishes them. Held weakly, so that its owner is freed when
        nobody else holds it; the thread then ends."""
        self._begin = begin
        self._begun: tuple[list[Job], Callable[[], None]] | None = None
        self._changed = threading.Condition()
        self._on_way: deque[Job] = deque()
        self._landed: list[Job] = []
        self._num_open = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="host-updates", daemon=True)
        self._thread.start()

    def give(self, job: Job) -> None:
        self.raise_failure()
        with self._changed:
            self._on_way.append(job)
            self._num_open += 1
            self._changed.notify_all()

    def settle(self) -> None:
        """Until all that was given is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0 or self._failure is not None)
        self.raise_failure()

    def wait_for(self, event: threading.Event) -> None:
        """For something the thread will do; where it has failed, that is raised instead."""
        while not event.wait(PATIENCE_SECONDS):
            self.raise_failure()
        self.raise_failure()

    def raise_failure(self) -> None:
        """What went wrong in the thread is told in the caller's."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """What was begun is finished; what was not, is dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():  # which may be the last to have held the owner
            self._thread.join()

    def _work(self) -> None:
        try:
            while (jobs := self._next()) is not None:
                before = self._begun
                if before is not None and not (jobs and _are_alike(jobs[0], before[0][0])):
                    self._finish(*before)  # jobs of another kind or step may be of the same parameters
                    before = None
                self._begun = (jobs, self._begun_by_owner(jobs)) if jobs else None
                if before is not None:
                    self._finish(*before)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _begun_by_owner(self, jobs: list[Job]) -> Callable[[], None]:
        begin = self._begin()
        return (lambda: None) if begin is None else begin(jobs)

    def _finish(self, jobs: list[Job], finish: Callable[[], None]) -> None:
        finish()
        with self._changed:
            self._num_open -= len(jobs)
            self._changed.notify_all()

    def _next(self) -> list[Job] | None:
        """Empty where none has landed while some are to be finished; None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._begun or self._on_way or self._landed)
                if self._is_closed and self._begun is None:
                    return None
                while self._on_way and self._on_way[0].arrival.is_there():
                    heapq.heappush(self._landed, self._on_way.popleft())
                if self._landed and not self._is_closed:
                    return self._batch()
                if self._begun is not None:
                    return []
                first = self._on_way[0]
            first.arrival.wait_on_host()

    def _batch(self) -> list[Job]:
        jobs = [heapq.heappop(self._landed)]
        num_elements = jobs[0].num_elements
        while self._landed and num_elements < BATCH_ELEMENTS and _are_alike(jobs[0], self._landed[0]):
            jobs.append(heapq.heappop(self._landed))
            num_elements += jobs[-1].num_elements
        return jobs


def _are_alike(one: Job, other: Job) -> bool:
    return (one.step, one.is_update) == (other.step, other.is_update)
