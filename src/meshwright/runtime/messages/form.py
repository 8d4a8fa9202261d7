"""Values as bytes and back (MessagePack), by their declared type: what does not fit the type is refused.

Beside what msgspec knows (numbers, text, lists, sets, tuples, dicts, dataclasses, Values), tensors and dtypes may be in a message.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwright.core.errors import RunError


class MessageError(RunError):
    """A message of another process that is not what it should be, or not from this job."""


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor inside a message."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode(data: bytes | memoryview, kind: Any, what: str) -> Any:
    """kind: what the value must be. what: where it came from, for the refusal."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MessageError(f"{what} cannot be read: {error}; ranks must run one and the same version") from error


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_made)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return _Tensor(_name(value.dtype), tuple(value.shape), data)
    if isinstance(value, torch.dtype):
        return _name(value)
    raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")


def _made(kind: type, found: Any) -> Any:
    if kind is torch.dtype:
        return _dtype(found)
    if kind is not Tensor:
        raise NotImplementedError(f"a message cannot hold a {kind.__name__}")
    parts = msgspec.convert(found, _Tensor)
    dtype = _dtype(parts.dtype)
    if not parts.data:
        return torch.empty(parts.shape, dtype=dtype)
    return torch.frombuffer(bytearray(parts.data), dtype=dtype).reshape(parts.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
