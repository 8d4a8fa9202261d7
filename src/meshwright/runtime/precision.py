"""Precision: fp64 and fp32 as they are; bf16 and fp16 compute in 16 bits and keep parameters, reductions and updates in fp32.

Whole parameters (ZeRO 0) are cast op by op by autocast; sharded ones are gathered in 16 bits. Losses are computed in fp32 by both,
also where a model computes its own (models/wide_losses.py). fp16 scales its loss (runtime/scaling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.core.plan import Plan
from meshwright.models.objective import Batch, map_batch
from meshwright.models.packed import Looked
from meshwright.models.wide_losses import WideLosses

STORED = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32}
LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


def store(module: nn.Module, plan: Plan, device: torch.device) -> nn.Module:
    """The module's tensors on the device, floating ones in the dtype the plan stores."""
    module._apply(lambda tensor: tensor.to(device=device, dtype=_stored(tensor, plan)))
    return module


def _stored(tensor: Tensor, plan: Plan) -> torch.dtype:
    """Complex tensors stay complex: `Module.to` would drop their imaginary halves."""
    if tensor.is_complex():
        return torch.complex128 if plan.precision == "fp64" else tensor.dtype
    return STORED[plan.precision] if tensor.is_floating_point() else tensor.dtype


def compute_context(
    plan: Plan, device: torch.device, splitter: AbstractContextManager[Any] | None = None
) -> Callable[[], AbstractContextManager[Any]]:
    """What forward and loss run in. Sharded modules cast by themselves (`sharded_policy`)."""
    looked = Looked() if device.type == "cuda" else None
    lowers = plan.precision in LOWER and plan.casting == "autocast"
    widens = plan.precision in LOWER and plan.casting == "parameters"

    @contextmanager
    def computing() -> Iterator[None]:
        with ExitStack() as stack:
            if looked is not None:
                stack.enter_context(looked.looked_for_once())
            if lowers:
                stack.enter_context(torch.autocast(device.type, dtype=LOWER[plan.precision]))
            if splitter is not None:
                stack.enter_context(splitter)
            if widens:
                stack.enter_context(WideLosses())  # last: a split loss is widened before it is split
            yield

    return computing


def sharded_policy(plan: Plan) -> MixedPrecisionPolicy:
    """Gather and compute in 16 bits, reduce gradients in fp32."""
    if plan.precision in LOWER:
        return MixedPrecisionPolicy(param_dtype=LOWER[plan.precision], reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def to_device(batch: Batch, plan: Plan, device: torch.device) -> Batch:
    """The batch where the module is; floating inputs follow an fp64 model."""

    def move(tensor: Tensor) -> Tensor:
        dtype = torch.float64 if plan.precision == "fp64" and tensor.is_floating_point() else tensor.dtype
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # a copy out of other memory waits for all that the device was given before
        return tensor.to(device=device, dtype=dtype, non_blocking=True)

    return map_batch(move, batch)
