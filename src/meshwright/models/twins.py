"""Modules that go by several block names (an embedding of encoder and decoder): each name gets a module of its own, which
shares its tensors, and so does a part that several blocks have, or that a block shares with the rest of the model. A call then
says which block it is of, and the blocks may lie on different stages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

from torch import nn


def separate(module: nn.Module, blocks: Iterable[str]) -> None:
    seen: set[int] = set()
    for name in blocks:
        block = module.get_submodule(name)
        if id(block) in seen:
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent)._modules[leaf] = _twin(block)
        seen.add(id(block))
    _separate_parts(module, blocks)


def _separate_parts(module: nn.Module, blocks: Iterable[str]) -> None:
    """Parts that several blocks share (one MLP for all layers), that are called outside of the blocks too, or are blocks."""
    owners = {id(module.get_submodule(name)): name for name in blocks}
    owners |= dict.fromkeys(_outside(module, set(owners)), "")
    for name in blocks:
        block = module.get_submodule(name)
        for path in [path for path, _ in block.named_modules(remove_duplicate=False) if path]:
            part = block.get_submodule(path)
            if owners.setdefault(id(part), name) != name:
                parent, _, leaf = path.rpartition(".")
                block.get_submodule(parent)._modules[leaf] = _twin(part)


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[int]:
    """The module and its parts that lie in no block, by identity."""
    yield id(module)
    for child in module.children():
        if id(child) not in blocks:
            yield from _outside(child, blocks)


def _twin(module: nn.Module) -> nn.Module:
    made = copy.copy(module)
    vars(made)["_parameters"] = dict(module._parameters)
    vars(made)["_buffers"] = dict(module._buffers)
    vars(made)["_modules"] = {name: child and _twin(child) for name, child in module._modules.items()}
    return made
