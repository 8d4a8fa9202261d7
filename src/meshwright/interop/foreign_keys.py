"""The known keys of other libraries' configurations, read from `foreign_keys.toml`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Literal, NamedTuple

import msgspec

from meshwright.core.codec import Value, decode_toml

FILE = "foreign_keys.toml"


class Section(Value, kw_only=True):
    """The keys of one section: the keys that are read, and the others by the reason why they are not."""

    used: tuple[str, ...] = ()
    without_effect: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    not_planned: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)


class KnownKey(NamedTuple):
    """The use of a key. `section`: it holds keys of its own."""

    kind: Literal["section", "used", "without effect", "not planned"]
    why: str = ""


KnownKeys = dict[str, dict[str, KnownKey]]
"""Section (its dotted name; "" for the file itself) → key → its use."""


def known_keys(library: Literal["deepspeed", "accelerate"]) -> KnownKeys:
    text = resources.files("meshwright.interop").joinpath(FILE).read_text(encoding="utf-8")
    sections = decode_toml(text, dict[str, dict[str, Section]], FILE)[library]
    found: KnownKeys = {name: dict(_keys_of(section)) for name, section in sections.items()}
    for name in found:
        if name:
            parent, _, key = name.rpartition(".")
            found[parent][key] = KnownKey("section")
    return found


def _keys_of(section: Section) -> Iterator[tuple[str, KnownKey]]:
    yield from ((key, KnownKey("used")) for key in section.used)
    yield from ((key, KnownKey("without effect", why)) for why, keys in section.without_effect.items() for key in keys)
    yield from ((key, KnownKey("not planned", why)) for why, keys in section.not_planned.items() for key in keys)
