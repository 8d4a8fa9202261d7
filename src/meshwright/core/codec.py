"""Strict reading and writing of values, as JSON or TOML.

Strict means: an unknown field, a wrong type or a wrong unit is refused with the path of the field and, where one is
near, the name that was probably meant. Nothing is guessed, nothing is dropped.

A field whose name ends in `_bytes` may be written as a size (`72GiB`), one ending in `_seconds` as a time (`3ms`).
JSON has no NaN and no infinity: the loss of a run that diverged is written as the word "nan", "inf" or "-inf".
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from functools import cache
from itertools import islice
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Self, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from meshwright.core.bounds import LARGEST_FILE_BYTES
from meshwright.core.errors import InputError, nearest
from meshwright.core.files.given_file import parse_json, parse_toml, read_given
from meshwright.core.units import parse_bytes, parse_seconds

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*?)`")
_PATH = re.compile(r" - at `\$?(?P<path>[^`]*)`$")
_PARSERS: tuple[tuple[str, Callable[[str], float]], ...] = (("_bytes", parse_bytes), ("_seconds", parse_seconds))
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value with a strict file form. Change one with `msgspec.structs.replace`."""

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "") -> Self:
        return decode_json(text, cls, where or cls.__name__)

    @classmethod
    def from_toml(cls, text: str, where: str = "") -> Self:
        return decode_toml(text, cls, where or cls.__name__)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a `.json` or `.toml` file."""
        return load(path, cls)

    def to_json(self) -> str:
        spelled = _each_float(msgspec.to_builtins(self), _spelled)
        return msgspec.json.format(msgspec.json.encode(spelled), indent=2).decode() + "\n"

    def to_toml(self) -> str:
        return tomli_w.dumps(without_none(msgspec.to_builtins(self)))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write as `.json` or `.toml`, whole or not at all."""
        target = Path(path)
        writers = {".json": self.to_json, ".toml": self.to_toml}
        if target.suffix not in writers:
            raise _wrong_suffix(target, "written to")
        return write_whole(target, writers[target.suffix]())

    @property
    def hash(self) -> str:
        """The same on every machine and version that reads the same fields; equal values have equal hashes."""
        return stable_hash(self)


class CheckedValue(Value, kw_only=True):
    """A value that is checked where it is made in code as its file would be: every field against its type and bounds."""

    def _refusal(self, problem: str) -> ValueError:
        return InputError(problem)

    def __post_init__(self) -> None:
        check_fields(self, self._refusal)


def check_fields(value: msgspec.Struct, refusal: Callable[[str], Exception]) -> None:
    """Every field against its type and bounds. refusal: makes the error from the words."""
    for name, kind in _types(type(value), include_extras=True).items():
        given = getattr(value, name)
        try:
            msgspec.convert(given, kind)
        except msgspec.ValidationError as wrong:
            raise refusal(f"{type(value).__name__}: {name}={given!r}: {_explain(str(wrong), kind)}") from None


def stable_hash(value: object) -> str:
    """Sixteen hex digits over the value's canonical JSON: keys sorted, whole numbers without a fraction."""
    canonical = _each_float(msgspec.to_builtins(value), _canonical)
    return hashlib.sha256(msgspec.json.encode(canonical, order="deterministic")).hexdigest()[:16]


@cache
def _types(kind: type[msgspec.Struct], *, include_extras: bool = False) -> dict[str, Any]:
    """The types of its fields; with extras, their bounds too."""
    return get_type_hints(kind, include_extras=include_extras)


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read a value from a `.json` or `.toml` file."""
    source = Path(path)
    if source.suffix not in (".json", ".toml"):
        raise _wrong_suffix(source, "read from")
    text = read_given(source, getattr(kind, "largest_file_bytes", LARGEST_FILE_BYTES))
    if source.suffix == ".toml":
        return decode_toml(text, kind, str(source))
    return decode_json(text, kind, str(source))


def _wrong_suffix(path: Path, verb: str) -> InputError:
    return InputError(f"{path}: a value is {verb} a .json or .toml file, not '{path.suffix or path.name}'")


def decode_json(text: str | bytes, kind: type[T], where: str) -> T:
    return decode(parse_json(text, where), kind, where)


def decode_toml(text: str, kind: type[T], where: str) -> T:
    return decode(parse_toml(text, where), kind, where)


def decode(raw: object, kind: type[T], where: str) -> T:
    """Builtins → a value of the given type, or an `InputError` with the path of the field."""
    try:
        return msgspec.convert(_with_units(raw, kind, where, ""), kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_explain(str(error), kind)}") from error


def write_whole(target: Path, text: str) -> Path:
    """Write a draft next to the target and rename it: a reader never sees half a file, and a full disk keeps the old one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def without_none(raw: Any) -> Any:
    """TOML has no null: an unset field is left out."""
    if isinstance(raw, dict):
        return {key: without_none(item) for key, item in raw.items() if item is not None}
    if isinstance(raw, list | tuple):
        return [without_none(item) for item in raw]
    return raw


def _each_float(raw: Any, change: Callable[[float], object]) -> Any:
    """Builtins with every float changed."""
    if isinstance(raw, dict):
        return {key: _each_float(item, change) for key, item in raw.items()}
    if isinstance(raw, list | tuple):
        return [_each_float(item, change) for item in raw]
    return change(raw) if isinstance(raw, float) else raw


def _spelled(number: float) -> float | str:
    return number if isfinite(number) else str(number)


def _canonical(number: float) -> float | str:
    """1 and 1.0 are equal, so they are written the same."""
    return int(number) if number.is_integer() else _spelled(number)


def _with_units(raw: object, kind: Any, where: str, path: str) -> object:
    """Builtins from a file with sizes, times and words for numbers read as numbers. kind: the type that is wanted here."""
    if isinstance(raw, dict):
        return {key: _with_units(item, _inside(kind, key), where, f"{path}.{key}") for key, item in raw.items()}
    if isinstance(raw, list):
        return [_with_units(item, _inside(kind, i), where, f"{path}[{i}]") for i, item in enumerate(raw)]
    if not isinstance(raw, str):
        return raw
    wanted = _without_none(kind)
    if wanted in (str, Any, None):  # text, or nothing that says it should be a number
        return raw
    if raw in _NOT_FINITE and wanted is float:
        return float(raw)
    return _quantity(raw, where, path)


def _quantity(text: str, where: str, path: str) -> float | str:
    for suffix, parse in _PARSERS:
        if path.endswith(suffix):
            try:
                return parse(text)
            except InputError as error:
                raise InputError(f"{where}: {path.lstrip('.')}: {error}") from None
    return text


def _explain(message: str, kind: Any) -> str:
    """msgspec's message, with our path first and the nearest valid name last."""
    match = _PATH.search(message)
    path = match["path"].lstrip(".") if match else ""
    said = message[: match.start()] if match else message
    unknown = _UNKNOWN.search(said)
    if unknown:
        name = unknown["name"]
        full = f"{path}.{name}" if path else name
        struct = _struct(_at(kind, path))
        valid = [field.encode_name for field in msgspec.structs.fields(struct)] if struct else []
        return f"{full}: unknown field '{name}': {nearest(name, valid)}"
    missing = _MISSING.search(said)
    if missing:
        return f"{path}.{missing['name']}: this field is missing: add it".lstrip(".")
    if path == "format":
        known = ", ".join(str(number) for number in get_args(_at(kind, path)))
        return f"format: {said}: this version reads format {known}; the file is from another version"
    choices = [str(choice) for choice in get_args(_at(kind, path)) if isinstance(choice, str | int)]
    wrong = re.fullmatch(r"Invalid enum value '?(?P<value>.*?)'?", said)
    if wrong and choices:
        said = f"'{wrong['value']}' is not valid: {nearest(wrong['value'], choices)}"
    return f"{path}: {said}" if path else said


def _at(kind: Any, path: str) -> Any:
    """The type at a path. A union with None counts as its other half."""
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path):
        place = step[1:-1]
        kind = _inside(kind, step if not step.startswith("[") else int(place) if place.isdecimal() else place)
    return _without_none(kind)


def _inside(kind: Any, step: str | int) -> Any:
    """The type of a field, found by name, or by position in a list or a struct that is written as one."""
    kind = _without_none(kind)
    struct = _struct(kind)
    if struct is None:
        arguments = [argument for argument in get_args(kind) if argument is not Ellipsis]
        return arguments[-1] if arguments else None
    types = _types(struct)
    return types.get(step) if isinstance(step, str) else next(islice(types.values(), step, None), None)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    halves = [half for half in get_args(kind) if half is not type(None)]
    return halves[0] if len(halves) == 1 else kind


def _struct(kind: Any) -> type[msgspec.Struct] | None:
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None
