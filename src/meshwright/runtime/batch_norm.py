"""Batch norm over the samples of all dp ranks: each microbatch is normalised as if one rank had all its samples.

P ranks with n numbers each a channel, local mean μᵢ and variance vᵢ; one all-reduce of both in forward, one of two sums in
backward:

    μ = Σ μᵢ / P        v = Σ (vᵢ + μᵢ²) / P - μ²        x̂ = (x - μ) / √(v + ε)
    ∂x = w / √(v + ε) · (∂y - Σ∂y / nP - x̂ · Σ(∂y x̂) / nP)      Σ over all ranks

torch's own SyncBatchNorm does the same on GPUs only. Module names, parameters and buffers stay as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.plan import Plan

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def sync_batch_norms(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    if not plan.sync_batch_norm or plan.mesh.dp == 1:
        return
    for part in module.modules():
        if isinstance(part, BatchNorm):
            run = partial(_forward, part, part.forward, mesh.get_group("dp"))
            part.forward = run  # type: ignore[method-assign]


def _forward(norm: BatchNorm, alone: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    if not norm.training and norm.running_mean is not None:
        return alone(x)  # type: ignore[no-any-return]
    y, mean, variance = _Normalise.apply(x, norm.weight, norm.bias, norm.eps, group)  # type: ignore[no-untyped-call]
    _follow(norm, mean, variance, x.numel() // x.shape[1] * group.size())
    return y  # type: ignore[no-any-return]


@torch.no_grad()
def _follow(norm: BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Running statistics, as torch keeps them: of the unbiased variance."""
    if not norm.training or norm.running_mean is None:
        return
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_((variance * (count / max(count - 1, 1))).to(norm.running_var.dtype), momentum)


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
