"""A rendezvous whose store is out of reach keeps nobody waiting.

A call of torch's store waits for its answer as long as TCP does: on a link that is cut, a quarter of an hour. The launcher's agent
asks the store ten times a second whether other hosts want to join; it would wait there, and not see that its ranks have ended.
Here a call is made by a thread of its own, and given up after some seconds:

    do other hosts want to join?     none that is known of: the ranks themselves judge whether the others are still there
    join                             tried again until the time to join is over
    close                            left; the others will see for themselves

While a call is under way no other is made. When the link comes back, its answer does too, and all goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
)

ANSWER_SECONDS = 5.0
"""An answer takes milliseconds; one that takes longer is waited for no more, and costs nothing but that."""
RETRY_SECONDS = 1.0
Answer = TypeVar("Answer")


class PatientBackend(RendezvousBackend):
    """Another backend, whose answers are given up after a while."""

    def __init__(self, backend: RendezvousBackend, seconds: float = ANSWER_SECONDS) -> None:
        self._backend, self._seconds = backend, seconds
        self._last: Future[Any] | None = None

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._ask(self._backend.get_state)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        return self._ask(partial(self._backend.set_state, state, token))

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        if self._last is not None and not self._last.done():
            raise RendezvousConnectionError("the store has not answered the last call yet")
        self._last = answer = Future[Answer]()
        Thread(target=_answer, args=(call, answer), name="rendezvous", daemon=True).start()
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            raise RendezvousConnectionError(f"the store did not answer within {self._seconds:g} s") from None


def _answer(call: Callable[[], Answer], answer: Future[Answer]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)


class PatientRendezvous(DynamicRendezvousHandler):
    def num_nodes_waiting(self) -> int:
        try:
            return int(super().num_nodes_waiting())
        except RendezvousConnectionError:
            return 0

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self.settings.timeout.join.total_seconds()
        while True:
            try:
                return super().next_rendezvous()
            except RendezvousConnectionError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_SECONDS)
