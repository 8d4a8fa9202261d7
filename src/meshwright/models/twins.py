"""Modules that go by several block names (an embedding of encoder and decoder): each name gets a module of its own, which
shares its tensors. A call then says which block it is of, and the blocks may lie on different stages."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn


def separate(module: nn.Module, blocks: Iterable[str]) -> None:
    seen: set[int] = set()
    for name in blocks:
        block = module.get_submodule(name)
        if id(block) in seen:
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent)._modules[leaf] = _twin(block)
        seen.add(id(block))


def _twin(module: nn.Module) -> nn.Module:
    made = copy.copy(module)
    vars(made)["_parameters"] = dict(module._parameters)
    vars(made)["_buffers"] = dict(module._buffers)
    vars(made)["_modules"] = {name: child and _twin(child) for name, child in module._modules.items()}
    return made
