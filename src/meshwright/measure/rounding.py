"""How much a model enlarges rounding, seen by running it twice: once as it is, once with every parameter moved by one ε.

Batch norm divides by the spread of a few values: where a deep network has small maps at its end, a difference of ε in a weight
becomes one of 1e-9 in a gradient. Two orders of the same sums differ as much, and no plan can be held to less:

    rounding = GROWTH · |a - a'| / |a|                                                      a': of the moved twin
    bound = max(16 · SLACK · ε · (number of blocks + 1),  min(rounding, MOST))

An error of the library is larger than MOST by far: a factor 1/dp is 0.5, one sample lost of a million 1e-6. A model whose rounding
is more than that, and whose results under a plan differ by no more than its rounding, cannot be compared: that is said.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.measure.distance import distance, largest

GROWTH = 64.0
"""Times what one ε per parameter does: a plan's sums differ in many places."""
MOST = 1e-7
SEED = 77


def move_parameters(module: nn.Module) -> None:
    """Each entry by one ε, up or down; those of whole numbers, which nothing trains, stay."""
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in (one for one in module.parameters() if one.is_floating_point() or one.is_complex()):
            signs = torch.randint(0, 2, parameter.shape, generator=random, dtype=torch.long) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs.to(parameter.dtype))


def enlarged(tensors: Mapping[str, Tensor], moved: Mapping[str, Tensor], floor: float) -> float:
    """The rounding that two runs of one process show: tensors of the model as it is, and of its moved twin."""
    found = 0.0
    for name, tensor in tensors.items():
        if name in moved and tensor.numel():
            scale = max(largest(tensor), floor, 1e-30)
            found = max(found, distance(tensor, moved[name]) / scale)
    return GROWTH * found
