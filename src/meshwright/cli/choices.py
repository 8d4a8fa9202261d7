"""Flags with a fixed set of words."""

from __future__ import annotations

from collections.abc import Sequence


def check_choice(flag: str, value: str, valid: Sequence[str]) -> None:
    from meshwright.core.errors import InputError, nearest

    if value not in valid:
        raise InputError(f"{flag} {value}: {nearest(value, valid)}")
