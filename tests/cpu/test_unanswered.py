"""A store that does not answer keeps no agent waiting, and is used again when it does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, RendezvousTimeout

from meshwright.core.errors import InputError
from meshwright.runtime import rendezvous as rendezvous_module
from meshwright.runtime import unanswered
from meshwright.runtime.rendezvous import LOOPBACK, listening_store
from meshwright.runtime.unanswered import PatientBackend, PatientRendezvous

LITTLE_SECONDS, PLENTY_SECONDS = 0.05, 60.0


class Link(RendezvousBackend):
    """Between an agent and its store; what is asked while it is cut is answered when it is mended."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self.backend, self.is_up, self.num_calls = backend, Event(), 0
        self.is_up.set()

    @property
    def name(self) -> str:
        return self.backend.name

    def get_state(self) -> Any:
        self._pass()
        return self.backend.get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        self._pass()
        return self.backend.set_state(state, token)

    def _pass(self) -> None:
        self.num_calls += 1
        assert self.is_up.wait(PLENTY_SECONDS)


@pytest.fixture
def link() -> Iterator[Link]:
    found = Link(C10dRendezvousBackend(listening_store(LOOPBACK, 0), "test"))
    yield found
    found.is_up.set()


def rendezvous(link: Link, seconds: float, join_seconds: float = PLENTY_SECONDS) -> Any:
    """Of one host, with its backend."""
    backend = PatientBackend(link, seconds)
    patience = RendezvousTimeout(join=timedelta(seconds=join_seconds), last_call=timedelta(seconds=LITTLE_SECONDS))
    handler = PatientRendezvous.from_backend("test", link.backend._store, backend, 1, 1, LOOPBACK, patience)  # type: ignore[attr-defined]
    return handler, backend


def test_a_call_is_given_up_and_its_answer_found_later(link: Link) -> None:
    backend = PatientBackend(link, LITTLE_SECONDS)
    assert backend.name == "c10d"
    link.is_up.clear()
    with pytest.raises(RendezvousConnectionError, match=r"did not answer within 0\.05 s"):
        backend.set_state(b"state")
    with pytest.raises(RendezvousConnectionError, match="has not answered the last call yet"):
        backend.get_state()
    assert link.num_calls == 1, "a second call went out while the first was under way"
    link.is_up.set()
    assert backend._last is not None
    backend._last.result(PLENTY_SECONDS)
    state, _ = PatientBackend(link, PLENTY_SECONDS).get_state() or (b"", None)
    assert state == b"state"


def test_an_error_of_the_store_is_passed_on(link: Link) -> None:
    def fail() -> Any:
        raise RendezvousConnectionError("refused")

    link.get_state = fail  # type: ignore[method-assign]
    with pytest.raises(RendezvousConnectionError, match="refused"):
        PatientBackend(link, PLENTY_SECONDS).get_state()


def test_an_agent_that_is_cut_off_sees_nobody_waiting_and_can_end(link: Link) -> None:
    handler, backend = rendezvous(link, PLENTY_SECONDS)
    assert handler.next_rendezvous().world_size == 1
    assert handler.num_nodes_waiting() == 0
    backend._seconds = LITTLE_SECONDS
    link.is_up.clear()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown() is False


def test_a_host_joins_when_the_link_is_back(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, backend = rendezvous(link, LITTLE_SECONDS)
    link.is_up.clear()

    def mend(_: float) -> None:
        link.is_up.set()
        backend._seconds = PLENTY_SECONDS
        assert backend._last is not None
        backend._last.result(PLENTY_SECONDS)

    monkeypatch.setattr(unanswered, "time", SimpleNamespace(monotonic=time.monotonic, sleep=mend))
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown() is True


def test_a_host_that_cannot_join_in_time_says_so(link: Link) -> None:
    handler, _ = rendezvous(link, LITTLE_SECONDS, join_seconds=0.001)
    link.is_up.clear()
    with pytest.raises(RendezvousConnectionError):
        handler.next_rendezvous()


def test_a_meeting_place_where_nobody_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "STORE_SECONDS", 1)
    with pytest.raises(InputError, match=r"nobody answers at 192\.0\.2\.1:29500, where the hosts are to meet, for 1 s"):
        rendezvous_module.meet("192.0.2.1", 29500)  # an address that is nobody's, by RFC 5737
