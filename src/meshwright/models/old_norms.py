"""`torch.nn.utils.weight_norm` and `spectral_norm` in their old form, and `torch.nn.utils.prune`: a pre-forward hook computes the
weight from other parameters.

It leaves the weight on the module as a plain tensor with a past, which can be neither copied nor moved. That tensor is let go of
here: the hook makes it again at every forward.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from meshwright.core.errors import ModelError

M = TypeVar("M", bound=nn.Module)


def without_computed_weights(module: M) -> M:
    """The same module."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                vars(part).pop(hook.name, None)
            elif isinstance(hook, BasePruningMethod):
                vars(part).pop(hook._tensor_name, None)
    return module


def check_can_be_built(name: str, module: nn.Module) -> None:
    """name: of the module's source."""
    for path, part in without_computed_weights(module).named_modules():
        where = f"module '{path}' ({type(part).__name__})" if path else type(part).__name__
        if any(map(is_lazy, (*part._parameters.values(), *part._buffers.values()))):
            raise ModelError(
                f"{name}: {where} has parameters without a size, which its first forward would give them: run the module once on "
                "the batch before it is returned, or give the sizes"
            )
        past = next(
            (key for key, one in vars(part).items() if isinstance(one, Tensor) and one.grad_fn is not None), None
        )
        if past is not None:
            raise ModelError(
                f"{name}: attribute '{past}' of {where} is a tensor that was computed from parameters when the module was built: a "
                "training step would go back to there only once; compute it in forward, or detach it"
            )
