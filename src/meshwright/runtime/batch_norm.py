"""Batch norm over the samples of all dp ranks: each microbatch is normalised as if one rank had all its samples.

P ranks with n numbers each a channel, local mean μᵢ and variance vᵢ; one all-reduce of both in forward, one of two sums in
backward:

    μ = Σ μᵢ / P        v = Σ (vᵢ + μᵢ²) / P - μ²        x̂ = (x - μ) / √(v + ε)
    ∂x = w / √(v + ε) · (∂y - Σ∂y / nP - x̂ · Σ(∂y x̂) / nP)      Σ over all ranks

torch's own SyncBatchNorm does the same on GPUs only, and with every rank of the job, also those that hold parts of the same
samples; in a model that has it this one takes its place. Module names, parameters and buffers stay as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.runtime.own_backward import refuse_second_derivative

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class FormerSyncBatchNorm(nn.BatchNorm1d):
    """A SyncBatchNorm of the user's, which takes inputs of any number of dims."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def sync_batch_norms(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    for name, part in module.named_modules():
        if type(part) is nn.SyncBatchNorm:
            _check_synced(name, plan)
            part.__class__ = FormerSyncBatchNorm  # type: ignore[assignment]
        if isinstance(part, BatchNorm) and plan.sync_batch_norm and plan.mesh.dp > 1:
            run = partial(_forward, part, part.forward, mesh.get_group("dp"))
            part.forward = run  # type: ignore[method-assign]


def _check_synced(name: str, plan: Plan) -> None:
    if plan.mesh.dp > 1 and not plan.sync_batch_norm:
        raise PlanError(
            f"'{name}' is a SyncBatchNorm, which normalises over the samples of all data-parallel ranks, and the plan has "
            f"sync_batch_norm false at dp={plan.mesh.dp}: plan with --sync-batch-norm (sync_batch_norm = true), or build the model "
            "with BatchNorm"
        )


def _forward(norm: BatchNorm, alone: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    if not norm.training and norm.running_mean is not None:
        return alone(x)  # type: ignore[no-any-return]
    follows = norm.training and norm.running_mean is not None
    running = (norm.running_mean, norm.running_var) if follows else (None, None)
    return normalised(x, *running, norm.weight, norm.bias, _momentum(norm) if follows else 0.0, norm.eps, group)


def _momentum(norm: BatchNorm) -> float:
    """Of this microbatch, which is counted."""
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    return norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)


def normalised(
    x: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """A torch function like `batch_norm`: where channels lie over tp, it is called on parts (runtime/split/rules/table.py)."""
    tensors = (x, running_mean, running_variance, weight, bias)
    if has_torch_function(tensors):
        others = (*tensors[1:], momentum, eps, group)
        return handle_torch_function(normalised, tensors, x, *others)
    y, mean, variance = _Normalise.apply(x, weight, bias, eps, group)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_variance is not None:
        count = x.numel() // x.shape[1] * group.size()
        _follow(running_mean, mean, momentum)
        _follow(
            running_variance, variance * (count / max(count - 1, 1)), momentum
        )  # as torch: of the unbiased variance
    return y  # type: ignore[no-any-return]


@torch.no_grad()
def _follow(running: Tensor, now: Tensor, momentum: float) -> None:
    running.lerp_(now.to(running.dtype), momentum)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = _exact(x)
        variance, mean = torch.var_mean(exact, _others(x), correction=0)
        sums = torch.cat([mean, variance + mean.square()])
        dist.all_reduce(sums, group=group)
        mean, square = (sums / group.size()).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        inverse = (variance + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        y = (exact - _wide(mean, x)) * _wide(scale, x)
        if bias is not None:
            y = y + _wide(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("batch norm over all dp ranks (sync_batch_norm)")
        x, weight, mean, inverse = ctx.saved_tensors
        exact = _exact(gradient)
        normal = (_exact(x) - _wide(mean, x)) * _wide(inverse, x)
        own = torch.cat([exact.sum(_others(x)), (exact * normal).sum(_others(x))])
        sums = own.clone()
        dist.all_reduce(sums, group=ctx.group)
        one, other = (sums / (x.numel() // x.shape[1] * ctx.group.size())).chunk(2)
        scale = inverse if weight is None else inverse * weight
        inner = (exact - _wide(one, x) - normal * _wide(other, x)) * _wide(scale, x)
        for_bias, for_weight = own.chunk(2)
        return (
            inner.to(x.dtype),
            None if weight is None else for_weight.to(weight.dtype),
            for_bias if ctx.has_bias else None,
            None,
            None,
        )


def _exact(x: Tensor) -> Tensor:
    """Statistics of 16-bit numbers are taken in fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _others(x: Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))
