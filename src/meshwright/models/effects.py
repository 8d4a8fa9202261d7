"""Tensors that a block leaves behind beside its result, where code outside it may find them: on attributes of its modules
(`self.aux_loss = …`), and in lists and dicts that its modules hold or that it was called with.

An Effect is named by where it is, seen from the block; its value is a nest of tensors and plain values:

    ("set", path, attribute)       what the attribute is now
    ("add", path, attribute)       what was appended to the list, or the new entries of the dict, that the attribute is
    ("add", "@", position)         the same of an argument
"""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.core.errors import PlanError
from meshwright.models.follow import tensors_in
from meshwright.models.snapshot import Snapshot

Key = tuple[str, str, str]
Effects = dict[Key, Any]
ARGUMENT = "@"


def find_effects(block: nn.Module, name: str, before: Snapshot, arguments: list[Any]) -> Effects:
    """What a call has left since. arguments: it was called with."""
    paths = {id(part): path for path, part in block.named_modules()}
    found: Effects = {
        ("set", paths[id(part)], attribute): value
        for (part, attribute), value in before.set_attributes().items()
        if _has_tensors(value)
    }
    places = _containers(before, paths, arguments)
    for container, items in before.filled():
        added = _added(container, items)
        if added is None or (_has_tensors(added) and id(container) not in places):
            raise _too_deep(name, container)
        if _has_tensors(added):
            found[places[id(container)]] = added
    return found


def read_effects(block: nn.Module, like: Effects, arguments: list[Any]) -> Effects:
    """The same effects of another call: `like` says where they are and how many items were added."""
    return {key: _read(_holder(block, key, arguments), key, value) for key, value in like.items()}


def apply_effects(block: nn.Module, effects: Effects, arguments: list[Any]) -> None:
    """As if the block had been called."""
    for key, value in effects.items():
        what, path, attribute = key
        if what == "set":
            vars(block.get_submodule(path))[attribute] = value
            continue
        container = _holder(block, key, arguments)
        container.update(value) if isinstance(container, dict) else container.extend(value)


def as_list(arguments: Any, options: dict[str, Any]) -> list[Any]:
    return [*arguments, *options.values()]


def _holder(block: nn.Module, key: Key, arguments: list[Any]) -> Any:
    _, path, attribute = key
    return arguments[int(attribute)] if path == ARGUMENT else getattr(block.get_submodule(path), attribute, None)


def _read(held: Any, key: Key, like: Any) -> Any:
    if key[0] == "set":
        return held
    return {name: held[name] for name in like} if isinstance(like, dict) else list(held)[len(held) - len(like) :]


def _containers(before: Snapshot, paths: dict[int, str], arguments: list[Any]) -> dict[int, Key]:
    found: dict[int, Key] = {
        id(value): ("add", ARGUMENT, str(position))
        for position, value in enumerate(arguments)
        if isinstance(value, list | dict)
    }
    for part, attributes in zip(before.parts, before.attributes, strict=True):
        for attribute, value in attributes.items():
            if isinstance(value, list | dict):
                found.setdefault(id(value), ("add", paths[id(part)], attribute))
    return found


def _added(container: Any, items: Any) -> Any:
    """None where something else happened than that items were added; nothing where none of it was a tensor."""
    if isinstance(container, dict):
        return {key: value for key, value in container.items() if key not in items or items[key] is not value}
    if isinstance(container, list):
        kept = container[: len(items)]
        if len(kept) == len(items) and all(one is other for one, other in zip(kept, items, strict=True)):
            return container[len(items) :]
    return None if _has_tensors(list(container)) or _has_tensors(list(items)) else []


def _has_tensors(value: Any) -> bool:
    return bool(tensors_in(value))


def _too_deep(name: str, container: Any) -> PlanError:
    return PlanError(
        f"the model cannot be cut at block '{name}': it changes a {type(container).__name__} of tensors that other code may read "
        "otherwise than by appending to a list, or adding to a dict, that is an attribute of its own or an argument; return these "
        "tensors, set them as attributes, or set pp to 1"
    )
