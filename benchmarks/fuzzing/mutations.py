"""Mutations of a valid input: of its tree (a value replaced, a key renamed, a list grown), and of its bytes.

The same random numbers make the same mutation, so that a number and a seed are enough to see one again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

import tomli_w
import yaml

from meshwright.core.codec import without_none

Path = tuple[str | int, ...]

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 7, -1, -5, 10**6, 10**9, 10**9 + 7, 10**12, 2**31, 2**53 + 1, 2**63, 2**64, 10**20, 10**400, 0.5, 1.5, -0.0, 1e-320,
    1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
WORDS: tuple[Any, ...] = (
    "", " ", "auto", "none", "nan", "inf", "72GiB", "1e400GiB", "3ms", "-1", "1000000", "blocks.0-2000000000",
    "blocks.0-99999999999999999999", "blocks.5-1", "blocks.0-9/0", "every:0", "every:99999999999999999999",
    "ünï¢ode \u2028", "\x00", "a" * 1000, "a" * 100_000, "../../x", "/dev/zero", "/dev/null", "text:/dev/zero",
    "hf:/dev/zero", "local", "../x.json", "x.toml", "{}", "[[", "%s%n", "gpt:layers=1000000", "gpt:hidden=1000000000000,heads=1",
    "tp1000000", "zbv", "dualpipev", "interleaved",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": {}}, {"a": 1})
TOKENS = (
    b"[", b"{", b"]", b"}", b'"', b",", b":", b"\n", b"\x00", b"\xff", b"\xed\xa0\x80", b"1e999", b"NaN", b"Infinity", b"9" * 20,
    b"9" * 5000, b"[" * 900, b"[" * 100_000, b"{\"a\":" * 900, b"\\ud800", b"&a [*a,*a]", b"= ", b"'''", b"#", b"-", b"2020-13-45",
)  # fmt: skip


def mutate(text: bytes, suffix: str, random: Random) -> bytes:
    """One to four changes to the tree, or to the bytes, or to both."""
    if suffix == ".name":
        return _mutate_name(text.decode(), random).encode("utf-8", "surrogatepass")
    way = random.random()
    if way < 0.85:
        text = _mutate_lines(text, random) if suffix == ".jsonl" else _mutate_tree(text, suffix, random)
    return _mutate_bytes(text, random) if way > 0.7 else text


def _mutate_tree(text: bytes, suffix: str, random: Random) -> bytes:
    tree = READERS[suffix](text.decode())
    for _ in range(_few(random)):
        tree = _change(tree, random)
    try:
        return WRITERS[suffix](tree).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError, AttributeError, yaml.YAMLError):  # what TOML or YAML has no form for
        return _mutate_bytes(text, random)


def _mutate_lines(text: bytes, random: Random) -> bytes:
    lines = text.splitlines()
    for _ in range(_few(random)):
        place = random.randrange(len(lines))
        way = random.randrange(5)
        if way == 0:
            lines.insert(place, lines[random.randrange(len(lines))])
        elif way == 1 and len(lines) > 1:
            del lines[place]
        else:
            lines[place] = _mutate_tree(lines[place], ".json", random) if _is_json(lines[place]) else b"5"
    return b"\n".join(lines) + b"\n"


def change(tree: Any, random: Random) -> Any:
    """One change somewhere in a tree of builtins, which stays as it is."""
    return _change(copy.deepcopy(tree), random)


def _change(tree: Any, random: Random) -> Any:
    """The same in the tree itself."""
    path = random.choice(list(_paths(tree)))
    if not path:
        return random.choice([tree, [tree], copy.deepcopy(random.choice(OTHERS))]) if random.random() < 0.1 else tree
    parent = _at(tree, path[:-1])
    random.choices(CHANGES, WEIGHTS)[0](tree, parent, path[-1], random)
    return tree


def _replace(tree: Any, parent: Any, key: Any, random: Random) -> None:
    parent[key] = copy.deepcopy(random.choice(random.choice((NUMBERS, NUMBERS, WORDS, OTHERS))))


def _vary(tree: Any, parent: Any, key: Any, random: Random) -> None:
    """Like what was there, but not quite."""
    value = parent[key]
    if isinstance(value, bool) or value is None:
        parent[key] = random.choice((not value, 1, "true"))
    elif isinstance(value, int) and abs(value) > 2**64:
        parent[key] = value // 3
    elif isinstance(value, int | float):
        parent[key] = random.choice(
            (value + 1, value - 1, -value, 2 * value, 10 * value, float(value), str(value), value / 3)
        )
    elif isinstance(value, str):
        parent[key] = _mutate_name(value, random)
    elif isinstance(value, list) and value:
        parent[key] = value * random.choice((2, 3, 20, 1000)) if len(value) < 20 else value[: len(value) // 2]


def _remove(tree: Any, parent: Any, key: Any, random: Random) -> None:
    del parent[key]


def _rename(tree: Any, parent: Any, key: Any, random: Random) -> None:
    if isinstance(parent, dict):
        parent[random.choice((f"{key}s", str(key).upper(), "", "[0]", "a.b", "format"))] = parent.pop(key)


def _graft(tree: Any, parent: Any, key: Any, random: Random) -> None:
    """A part of the tree in another place."""
    parent[key] = copy.deepcopy(_at(tree, random.choice(list(_paths(tree)))))


def _nest(tree: Any, parent: Any, key: Any, random: Random) -> None:
    for _ in range(random.choice((1, 2, 70, 300))):
        parent[key] = [parent[key]] if random.random() < 0.5 else {"a": parent[key]}


def _grow(tree: Any, parent: Any, key: Any, random: Random) -> None:
    if isinstance(parent, list):
        parent += [copy.deepcopy(parent[key]) for _ in range(random.choice((1, 2, 10, 500)))]
    else:
        parent[f"{key}_"] = copy.deepcopy(parent[key])


CHANGES: tuple[Callable[[Any, Any, Any, Random], None], ...] = (_replace, _vary, _remove, _rename, _graft, _nest, _grow)
WEIGHTS = (6, 9, 2, 1, 2, 1, 1)


def _mutate_name(text: str, random: Random) -> str:
    """A text by its letters, its numbers and its parts."""
    for _ in range(_few(random)):
        place = random.randrange(len(text) + 1)
        end = min(len(text), place + random.randrange(1, 6))
        parts = text.split(",")
        way = random.randrange(6)
        if way == 0:
            text = text[:place] + random.choice("0123456789abz=,:.+-/é\x00 \n") + text[place:]
        elif way == 1:
            text = text[:place] + text[end:]
        elif way == 2:
            number = random.choice(
                ("0", "-1", "3", "1e9", "nan", "999999999999", "9" * 30, "9" * 5000, "1000000", "2.5")
            )
            text = text[:place].rstrip("0123456789") + number + text[place:].lstrip("0123456789")
        elif way == 3:
            text = ",".join([*parts, random.choice(parts)])
        elif way == 4:
            text = text[:place] + str(random.choice(WORDS)) + text[place:]
        else:
            text = text[:end] + text[place:]
    return text


def _mutate_bytes(text: bytes, random: Random) -> bytes:
    for _ in range(_few(random)):
        place = random.randrange(len(text) + 1)
        end = min(len(text), place + random.choice((1, 1, 2, 8, 64)))
        way = random.randrange(6)
        if way == 0:
            text = text[:place] + bytes([random.randrange(256)]) + text[end:]
        elif way == 1:
            text = text[:place] + text[end:]
        elif way == 2:
            text = text[:place] + random.choice(TOKENS) + text[place:]
        elif way == 3:
            text = text[:place]
        elif way == 4:
            text = text[:end] + text[place:]
        else:
            text = text[:place] + bytes(random.choice(b"0123456789.-e") for _ in range(3)) + text[place:]
    return text


def _few(random: Random) -> int:
    return random.choices((1, 2, 3, 4), (12, 3, 1, 1))[0]


def _paths(tree: Any, path: Path = ()) -> list[Path]:
    found = [path]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in list(items)[:200]:
        found += _paths(item, (*path, key)) if len(path) < 12 else []
    return found


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read_toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


READERS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": _read_toml, ".yaml": yaml.safe_load}
WRITERS: dict[str, Callable[[Any], str]] = {
    ".json": lambda tree: json.dumps(tree, indent=1),
    ".toml": lambda tree: tomli_w.dumps(without_none(tree)),
    ".yaml": lambda tree: str(yaml.safe_dump(tree)),
}
