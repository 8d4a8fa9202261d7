"""Which parameters ZeRO gathers and reduces together. The runtime shards by it, the cost model counts by it.

An item of a list (`blocks.3`) is a group of its own, unless it shares a parameter with something outside it; all else
is one group, named ''.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.graph import Parameter
from meshwright.core.names import is_list_item


def shard_groups(parameters: Iterable[Parameter], blocks: Iterable[str]) -> dict[str, tuple[Parameter, ...]]:
    """Group name → its parameters, each tensor once; '' comes first and may be empty."""
    items = set(filter(is_list_item, blocks))
    listed = list(parameters)
    owner = {parameter.name: _owner(parameter.name, items) for parameter in listed}
    for parameter in listed:
        if parameter.tied_to is not None and owner[parameter.name] != owner[parameter.tied_to]:
            items -= {owner[parameter.name], owner[parameter.tied_to]}
    groups: dict[str, list[Parameter]] = {"": []}
    for parameter in listed:
        if parameter.tied_to is None:
            groups.setdefault(_owner(parameter.name, items), []).append(parameter)
    return {name: tuple(group) for name, group in groups.items()}


def _owner(parameter: str, items: set[str]) -> str:
    parts = parameter.split(".")
    return next((path for end in range(len(parts)) if (path := ".".join(parts[:end])) in items), "")
