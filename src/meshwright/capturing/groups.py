"""Groups of blocks that are alike: the trace follows a few of each and skips the rest.

Alike means: items of one container with the same classes inside, the same parameters and buffers (name, shape, dtype,
trained or not), and the same settings (numbers, words, truth values and functions held by their modules). A number that is
each block's own position in the container does not count. A block that shares a parameter with another, or has hooks of
the user's, is alike to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn

SMALLEST = 4
"""The first two and the last of a group are followed: with fewer blocks nothing is left to skip."""
_SETTINGS = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Settings = dict[str, Any]
"""Path and name of an attribute → what it is, as something that can be compared and hashed."""


@dataclass(frozen=True)
class Group:
    """Names of blocks that are alike, in module order."""

    names: tuple[str, ...]

    @property
    def representative(self) -> str:
        return self.names[1]

    @property
    def skipped(self) -> tuple[str, ...]:
        """The last one is followed: it may add up fewer gradients than the others."""
        return self.names[2:-1]


class CannotSkip(Exception):  # noqa: N818 - no error: the module is then followed with fewer groups, or none
    """What was to be skipped turned out to matter."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group


def find_groups(module: nn.Module, blocks: dict[str, bool]) -> list[Group]:
    containers: dict[str, list[str]] = {}
    for name in blocks:
        if blocks[name]:
            containers.setdefault(name.rpartition(".")[0], []).append(name)
    uses = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    found: list[Group] = []
    for names in containers.values():
        parts = {name: part for name in names if _stands_alone(part := module.get_submodule(name), uses)}
        found.extend(Group(tuple(alike)) for alike in _alike(parts) if len(alike) >= SMALLEST)
    return found


def _stands_alone(block: nn.Module, uses: Counter[int]) -> bool:
    own = Counter(id(tensor) for _, tensor in block.named_parameters(remove_duplicate=False))
    hooked = any(getattr(part, hooks) for part in block.modules() for hooks in _HOOKS)
    return not hooked and all(uses[key] == count for key, count in own.items())


def _alike(parts: dict[str, nn.Module]) -> list[list[str]]:
    described = {name: _describe(part) for name, part in parts.items()}
    positions = {name: int(last) if (last := name.rpartition(".")[2]).isdigit() else -1 for name in parts}
    first = next(iter(described.values()), {})
    own = {path for path in first if all(described[name].get(path) == positions[name] for name in parts)}
    groups: dict[frozenset[tuple[str, Hashable]], list[str]] = {}
    for name, settings in described.items():
        groups.setdefault(frozenset(item for item in settings.items() if item[0] not in own), []).append(name)
    return list(groups.values())


def _describe(block: nn.Module) -> Settings:
    found: Settings = {}
    for path, part in block.named_modules():
        found[f"{path}:class"] = type(part)
        for name, value in vars(part).items():
            if (spelled := _spelled(value)) is not _OTHER:
                found[f"{path}.{name}"] = spelled
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            found[f"{path}.{name}"] = _metadata(tensor)
    return found


_OTHER = object()


def _spelled(value: Any) -> Hashable:
    """Settings as they are, tuples and lists of them too; anything else is left out."""
    if isinstance(value, _SETTINGS):
        return (type(value), value) if isinstance(value, bool) else value
    if isinstance(value, list | tuple):
        items = tuple(map(_spelled, value))
        return _OTHER if _OTHER in items else items
    return _OTHER


def _metadata(tensor: Tensor | None) -> Hashable:
    return tensor if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
