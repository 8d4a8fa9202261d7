"""Float64 through and through: for as long as `exact` lasts, nothing is computed in a narrower floating dtype.

Models written for 16 bits widen some steps by casting to float32 (norms, softmaxes, rotary angles). In a model of float64
such a cast narrows, and its rounding of 1e-8 depends on the order of the sums before it: a plan that sums in another order
than one process would differ by that much, and real errors could hide below. Here every cast to a narrower dtype, and every
op told to use one (`dtype=`), uses float64 instead, also where a tensor is made from nothing: else it would meet a wide one
in a product that takes only tensors of one dtype.

A mode of torch functions sees what Python calls in forward. Backward runs in the dtypes that forward left, without the mode:
torch leaves all modes there. A block that is recomputed gets it back (runtime/recompute.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.models.faked.attributes import widen_attributes
from meshwright.models.loss_reads import read_by
from meshwright.models.objective import Batch, Objective, map_batch
from meshwright.runtime.deferred import check_can_be_divided, is_deferred

WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
"""Methods whose name is the dtype."""
TOLD = {Tensor.to, Tensor.type}
"""Methods that take a dtype by position, the second also as the name of a class."""
CLASSES = {f"torch.{name}Tensor": torch.float64 for name in ("Float", "Half", "BFloat16")}


@contextmanager
def exact() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():
            yield
    finally:
        torch.set_default_dtype(usual)


class _Widening(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if function in CASTS:
            return arguments[0].to(torch.float64, **options)
        if function in TOLD:
            arguments = tuple(_wide(argument) for argument in arguments)
        if "dtype" in options:
            options["dtype"] = _wide(options["dtype"])
        return function(*arguments, **options)


def _wide(argument: Any) -> Any:
    """A narrow dtype → the wide one; anything else as it is."""
    if isinstance(argument, torch.dtype):
        return WIDE.get(argument, argument)
    return CLASSES.get(argument, argument) if isinstance(argument, str) else argument


def widened(module: nn.Module) -> nn.Module:
    """The module in float64: parameters, buffers and other tensors that its parts hold; complex ones too, which `double` leaves."""
    if any(map(is_deferred, module.parameters())):
        check_can_be_divided(module)
    module.double()
    if any(tensor.is_complex() for tensor in (*module.parameters(), *module.buffers())):
        module._apply(lambda tensor: tensor.to(torch.complex128) if tensor.is_complex() else tensor)
    return widen_attributes(module)


def widened_batch(batch: Batch) -> Batch:
    """Floating tensors in float64, as the model's parameters are."""
    return map_batch(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)


@contextmanager
def widened_loss(objective: Objective) -> Iterator[None]:
    """What a loss reads beside its arguments (weights of classes, a frozen network) in float64 too."""
    held = list(read_by(objective.loss).values()) if objective.is_given else []
    tensors = [
        t for one in held for t in ((*one.parameters(), *one.buffers()) if isinstance(one, nn.Module) else (one,))
    ]
    narrow = {id(tensor): (tensor, tensor.dtype) for tensor in tensors if tensor.dtype in WIDE}
    for tensor, dtype in narrow.values():
        tensor.data = tensor.data.to(WIDE[dtype])
    try:
        yield
    finally:
        for tensor, dtype in narrow.values():
            tensor.data = tensor.data.to(dtype)
