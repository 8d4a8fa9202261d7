"""Modules of experts, known by their structure: transformers' own, ours, and anyone's that is called alike.

forward(rows [N, H], chosen experts [N, k], their weights [N, k]) → [N, H]
"""

from __future__ import annotations

import inspect

from torch import Tensor, nn


def find_experts(module: nn.Module) -> dict[str, int]:
    """Modules of experts → how many experts each has."""
    return {name: count for name, part in module.named_modules() if (count := _num_experts(part))}


def _num_experts(part: nn.Module) -> int:
    """Known by their structure: all parameters stacked along a first dim of the same size, matrices among them, and a forward
    of three arguments. 0 for any other module."""
    own = list(part.parameters(recurse=False))
    sizes = {parameter.shape[0] if parameter.dim() else 0 for parameter in own}
    if len(sizes) != 1 or len(list(part.parameters())) > len(own) or max(one.dim() for one in own) < 3:
        return 0
    taken = inspect.signature(part.forward).parameters.values()
    needed = [one for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return sizes.pop() if len(needed) == 3 else 0


def idle_experts(module: nn.Module) -> None:
    """For a module that is only followed on fake tensors: which rows an expert gets is a matter of values, which those do not
    have. The modules of experts give back something like their rows from now on."""
    for name in find_experts(module):
        module.get_submodule(name).forward = _hand_on


def _hand_on(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return rows * weights[:, :1].to(rows.dtype)
