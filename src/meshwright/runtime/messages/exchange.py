"""Small values between ranks: from every rank to every rank, and from the first to all.

Sizes travel first, then the messages, as bytes of tensors: two collectives each, as torch's own exchange of objects has them, which
would pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.errors import RunError
from meshwright.runtime.messages.form import MessageError, decode, encode
from meshwright.runtime.messages.seal import seal, unseal

T = TypeVar("T")
MOST_BYTES = 1 << 36
"""Of one message: what claims to be longer is none of ours."""


def all_ranks(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value each rank gave, in the order of ranks: of a group, or all. kind: the type that each must have."""
    own = _as_bytes(seal(_said(dist.get_rank()), encode(value)), group)
    sizes = _gather(torch.tensor([own.numel()], dtype=torch.int64, device=own.device), group)
    lengths = [_length(int(size)) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=own.device)
    padded[: own.numel()] = own
    found = []
    for number, (message, length) in enumerate(zip(_gather(padded, group), lengths, strict=True)):
        sender = number if group is None else dist.get_global_rank(group, number)
        found.append(_read(message[:length], _said(sender), kind))
    return found


def from_first(make: Callable[[], T], kind: Any) -> T:
    """A value that only rank 0 makes, on every rank. What fails there is raised everywhere."""
    problem: Exception | None = None
    sent = b""
    if dist.get_rank() == 0:
        try:
            sent = encode(("", encode(make())))
        except Exception as error:
            problem = error
            sent = encode((f"rank 0 failed: {error}", b""))
    said, value = _read(_broadcast(sent), _said(0), tuple[str, bytes])
    if problem is not None:
        raise problem
    if said:
        raise RunError(said)
    found: T = decode(value, kind, "what rank 0 decided")
    return found


def device_of_messages(group: dist.ProcessGroup | None = None) -> torch.device:
    """Small messages go over the host where the group can: a device need not be waited for."""
    backends = dist.get_backend_config(group)
    return torch.device("cpu" if "cpu:" in backends else "cuda")


def _broadcast(message: bytes) -> Tensor:
    """From rank 0, sealed."""
    own = _as_bytes(seal(_said(0), message) if message else b"", None)
    size = torch.tensor([own.numel()], dtype=torch.int64, device=own.device)
    dist.broadcast(size, src=0)
    if not own.numel():
        own = torch.empty(_length(int(size)), dtype=torch.uint8, device=own.device)
    dist.broadcast(own, src=0)
    return own


def _gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts


def _as_bytes(message: bytes, group: dist.ProcessGroup | None) -> Tensor:
    host = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
    return host.to(device_of_messages(group))


def _read(message: Tensor, purpose: str, kind: Any) -> Any:
    return decode(unseal(purpose, message.cpu().numpy().tobytes()), kind, purpose)


def _said(rank: int) -> str:
    return f"a message of rank {rank}"


def _length(claimed: int) -> int:
    if not 0 < claimed <= MOST_BYTES:
        raise MessageError(f"a message of another rank claims to have {claimed} bytes: it is not one of this job's")
    return claimed
