"""`torch.nn.utils.weight_norm` and `spectral_norm` in their old form: a pre-forward hook computes the weight from other parameters.

It leaves the weight on the module as a plain tensor with a past, which can be neither copied nor moved. That tensor is let go of
here: the hook makes it again at every forward.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

M = TypeVar("M", bound=nn.Module)


def without_computed_weights(module: M) -> M:
    """The same module."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                vars(part).pop(hook.name, None)
    return module
