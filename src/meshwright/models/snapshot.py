"""A Snapshot: what a module holds beside its parameters at one moment, to be compared with later, or put back.

A forward may leave more behind than what it returns: an attribute (`self.aux_loss = …`), a counter, a list it appends to, a
buffer it updates in place or replaces, a parameter it writes without a gradient. Attributes are compared by identity, the items of
lists, dicts and sets one by one, tensors by their version counters. Objects of other classes are not looked into.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

OWN = frozenset(vars(nn.Module())) | {"forward", "_call_impl"}
"""Attributes that torch keeps on a module, and those that a runtime wraps."""
CONTAINERS = (list, dict, set, deque)
Place = tuple[nn.Module, str]


class Snapshot:
    def __init__(self, parts: Iterable[nn.Module], copied: Iterable[Tensor] = (), arguments: Any = ()) -> None:
        """copied: buffers and parameters whose values are put back too. arguments: what else may hold containers."""
        self.parts = list(parts)
        self.attributes = [_attributes(part) for part in self.parts]
        self.buffers = [dict(part._buffers) for part in self.parts]
        self.items = _items([*self.attributes, {"": arguments}])
        self.versions = {id(tensor): (tensor, tensor._version) for part in self.parts for tensor in own_tensors(part)}
        self.copies = [(tensor, tensor.detach().clone()) for tensor in copied]

    def restore(self) -> None:
        for part, attributes, buffers in zip(self.parts, self.attributes, self.buffers, strict=True):
            for name in _attributes(part).keys() - attributes.keys():
                del vars(part)[name]
            vars(part).update(attributes)
            for name, buffer in buffers.items():
                if name not in part._buffers or part._buffers[name] is not buffer:
                    part._buffers[name] = buffer
        for container, items in self.items.values():
            if not _is_same(container, items):
                _fill(container, items)
        for tensor, value in self.copies:
            tensor.detach().copy_(value)

    def set_attributes(self) -> dict[Place, Any]:
        """Attributes that are others now, with what they are."""
        found: dict[Place, Any] = {}
        for part, before in zip(self.parts, self.attributes, strict=True):
            for name, value in _attributes(part).items():
                if name not in before or value is not before[name]:
                    found[part, name] = value
        return found

    def filled(self) -> Iterator[tuple[Any, Any]]:
        """Containers that hold other items now, each with a copy of those it held."""
        return ((container, items) for container, items in self.items.values() if not _is_same(container, items))

    def written(self) -> list[Tensor]:
        """Buffers and parameters that were written in place since."""
        return [tensor for tensor, version in self.versions.values() if tensor._version != version]

    def changed_parts(self) -> list[nn.Module]:
        """Modules that hold something else now, or other items in something they hold."""
        filled = {id(container) for container, _ in self.filled()}
        others = {id(part) for part, _ in (*self.set_attributes(), *self.replaced_buffers())}
        return [
            part
            for part, attributes in zip(self.parts, self.attributes, strict=True)
            if id(part) in others or not filled.isdisjoint(_items([attributes]))
        ]

    def replaced_buffers(self) -> list[Place]:
        return [
            (part, name)
            for part, before in zip(self.parts, self.buffers, strict=True)
            for name, buffer in part._buffers.items()
            if buffer is not before.get(name)
        ]


def own_tensors(part: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None]


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in OWN}


def _items(attributes: list[dict[str, Any]]) -> dict[int, tuple[Any, Any]]:
    """Every container that an attribute is or holds, with a copy of it."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting = [value for held in attributes for value in held.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, CONTAINERS) and id(value) not in found:
            found[id(value)] = (value, copy.copy(value))
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            waiting += value
    return found


def _is_same(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        return all(key in items and value is items[key] for key, value in container.items())
    return all(one is other for one, other in zip(container, items, strict=True))


def _fill(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(items)
    else:
        container.update(items)
