"""What hosts leave for each other in the store they meet at, in a form that nothing can be run from, and sealed.

torch's rendezvous pickles its state, and unpickles what it finds in the store: whoever can reach that port could have the hosts run
anything. Here what goes out is written as plain values and sealed with the job's key, and what comes in is read strictly.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from meshwright.core.codec import Value
from meshwright.runtime._torch_distributed import meeting_of, pickled_meeting
from meshwright.runtime.messages.form import decode, encode
from meshwright.runtime.messages.seal import seal, unseal

PURPOSE = "the state of the rendezvous"
Host = tuple[str, int, int]
"""Address, process, and a number within it."""


class Meeting(Value, kw_only=True):
    """The fields of torch's own state."""

    round: int
    complete: bool
    deadline: datetime | None
    closed: bool
    participants: tuple[tuple[Host, int], ...]
    wait_list: tuple[Host, ...]
    redundancy_list: tuple[Host, ...]
    last_heartbeats: tuple[tuple[Host, datetime], ...]


class SealedBackend(RendezvousBackend):
    """Another backend, whose store sees nothing but sealed plain values."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (_read(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(_written(state), token)
        return None if found is None else (_read(found[0]), found[1], found[2])


def _written(pickled: bytes) -> bytes:
    return seal(PURPOSE, encode(msgspec.convert(meeting_of(pickled), Meeting)))


def _read(sealed: bytes) -> bytes:
    meeting: Meeting = decode(unseal(PURPOSE, sealed), Meeting, PURPOSE)
    return pickled_meeting(msgspec.structs.asdict(meeting))
