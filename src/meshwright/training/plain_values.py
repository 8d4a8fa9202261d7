"""What is no tensor, as JSON: settings of an optimizer, a loss scale.

Numbers that JSON lacks are spelled, and a tensor of one number is that number; what they are read for says how to read them back.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from meshwright.core.bounds import MOST_COUNT
from meshwright.core.errors import CheckpointError

SPELLED = "float"
"""The key of a number that JSON has no word for."""


def to_plain(name: str, value: Any) -> Any:
    """As JSON can hold it, or refused: a checkpoint that loses something is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return to_plain(name, value.item())
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {SPELLED: str(value)}
    if isinstance(value, list | tuple):
        return [to_plain(name, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and set(value) != {SPELLED}:
        return {key: to_plain(name, item) for key, item in value.items()}
    raise CheckpointError(
        f"'{name}' is a {type(value).__name__}, which cannot be written as JSON: keep numbers, text, lists or tensors there"
    )


def is_plain_number(plain: Any) -> bool:
    """Whether JSON holds a number here, spelled or not, that a float can hold."""
    if isinstance(plain, dict):
        return set(plain) == {SPELLED} and plain[SPELLED] in ("nan", "inf", "-inf")
    return isinstance(plain, float) or (
        isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= MOST_COUNT
    )


def like(own: Any, plain: Any) -> Any:
    """A value read back, of the kind that the program has in its place."""
    if isinstance(plain, dict) and set(plain) == {SPELLED}:
        return like(own, float(plain[SPELLED]))
    if isinstance(own, Tensor) and isinstance(plain, bool | int | float):
        return torch.full_like(own, plain)
    if isinstance(plain, list):
        kind = tuple if isinstance(own, tuple) else list
        owns = own if isinstance(own, list | tuple) and len(own) == len(plain) else [None] * len(plain)
        return kind(like(one, item) for one, item in zip(owns, plain, strict=True))
    if isinstance(plain, dict):
        return {key: like(own.get(key) if isinstance(own, dict) else None, item) for key, item in plain.items()}
    return plain
