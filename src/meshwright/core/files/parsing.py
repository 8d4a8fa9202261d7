"""JSON and TOML → builtins: lists, dicts, text and numbers, nested no deeper than the limit, no key given twice."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import msgspec

from meshwright.core.bounds import MOST_LETTERS, MOST_NESTED
from meshwright.core.errors import InputError


def parse_json(text: str | bytes, where: str) -> Any:
    try:
        raw = msgspec.json.decode(text)
    except RecursionError:
        raise InputError(_too_deep(where)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    check_plain(raw, where)
    try:
        json.loads(text, object_pairs_hook=_refuse_repeated)  # msgspec would keep the last of two
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return raw


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        raw = tomllib.loads(text)
    except RecursionError:
        raise InputError(_too_deep(where)) from None
    except ValueError as error:  # its own error, or a number or a date that Python does not have
        raise InputError(f"{where}: not valid TOML: {error}") from error
    check_plain(raw, where)
    return raw


def check_plain(raw: object, where: str) -> None:
    """Nothing is nested too deeply, and no text is too long. Level by level: to recurse would be what it guards against."""
    level: list[object] = [raw]
    for _ in range(MOST_NESTED):
        if not level:
            return
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and len(item) > MOST_LETTERS:
                raise InputError(f"{where}: a text of {len(item)} letters: a text here has at most {MOST_LETTERS}")
        level = below
    if level:
        raise InputError(_too_deep(where))


def _too_deep(where: str) -> str:
    return f"{where}: lists and objects are nested more than {MOST_NESTED} deep: a value of this kind never is"


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InputError(f"{key}: the field is given twice: keep one of them")
        seen.add(key)
