"""A module on tensors without memory: its parameters and buffers as fakes, and a call that uses them in place of its own.

Inside a fake mode. Blocks that are alike share theirs: a deep model has few that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from meshwright.core.names import expand_names
from meshwright.core.plan import Plan
from meshwright.models.objective import Batch, map_batch
from meshwright.runtime.split.alike import make_of


class Called(nn.Module):
    """A module called with other parameters than its own."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.call = lambda *args, **kwargs: functional_call(module, parameters, args, kwargs, tie_weights=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)  # type: ignore[no-untyped-call]


def faked_batch(batch: Batch) -> Batch:
    """As large as the batch; inside a fake mode, without memory."""
    return map_batch(torch.empty_like, batch)


def faked(module: nn.Module, alike: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Parameters and buffers, on the CPU as far as the module can see. alike: a block whose tensors may be those of another → that
    one."""
    found: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    same = _same_names(module, alike or {})
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in same and id(parameter) not in made:
            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        if name not in same:
            found[name] = made[id(parameter)]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name not in same:
            found[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return found | {name: found[first] for name, first in same.items()}


def _same_names(module: nn.Module, alike: Mapping[str, str]) -> dict[str, str]:
    """A tensor of a block → that of the block it is alike to."""
    found = {}
    for block, first in alike.items():
        part = module.get_submodule(block)
        for name, _ in (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)):
            found[f"{block}.{name}"] = f"{first}.{name}"
    return found


def first_alike(module: nn.Module, plan: Plan) -> dict[str, str]:
    """Blocks that are made like an earlier one and cut by the same rule → that one."""
    rule_of = {block: number for number, rule in enumerate(plan.sharding) for block in expand_names(rule.for_blocks)}
    firsts: dict[Any, str] = {}
    found = {}
    for block in filter(None, plan.blocks):
        key = (make_of(module.get_submodule(block)), rule_of.get(block))
        first = firsts.setdefault(key, block)
        if first != block:
            found[block] = first
    return found


class Steps(TorchFunctionMode):
    """Counts the functions that a trial calls, to see how far it gets."""

    num_taken = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_taken += 1
        return function(*args, **(kwargs or {}))
