"""Tensors that a module keeps as plain attributes: neither parameters nor buffers, so that `module.to` passes them by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def plain_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where each lies: the attributes of its module, and its name among them."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                yield vars(part), name, value


def widen_attributes(module: nn.Module) -> nn.Module:
    """Floating ones in float64, as `module.double()` does with parameters and buffers."""
    for attributes, name, tensor in plain_tensors(module):
        if tensor.is_floating_point():
            attributes[name] = tensor.double()
    return module


def fake_attributes(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Stand-ins on the CPU in the place of each; floating ones in this dtype, if there is one. Inside a fake mode."""
    made: dict[int, Tensor] = {}
    for attributes, name, tensor in plain_tensors(module):
        kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kept, device="cpu")
        attributes[name] = made[id(tensor)]
