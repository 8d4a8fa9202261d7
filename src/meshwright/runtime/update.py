"""The update that ends a step: gradients are settled among ranks, unscaled, clipped, and given to the optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from meshwright.core.axes import Axis
from meshwright.core.plan import Plan
from meshwright.runtime.clip import axes_of_parameters, clip
from meshwright.runtime.data_parallel import inner, reduce_scalars, shard_group
from meshwright.runtime.mesh import axis_groups
from meshwright.runtime.offload.optimizer import HostOptimizer
from meshwright.runtime.pipeline.pipeline import Pipeline
from meshwright.runtime.scaling import LossScale
from meshwright.runtime.split.model import SplitModel
from meshwright.runtime.usage import drop_unused


class Update:
    def __init__(
        self, module: nn.Module, optimizer: Optimizer, plan: Plan, mesh: DeviceMesh, max_norm: float | None,
        split: SplitModel | None, pipeline: Pipeline | None, host: HostOptimizer | None = None,
    ) -> None:  # fmt: skip
        """module: as it is spread. max_norm: what gradients are clipped to, if they are."""
        self.module = inner(module)
        self.optimizer, self.plan, self.mesh, self.max_norm = optimizer, plan, mesh, max_norm
        self.split, self.pipeline, self.host = split, pipeline, host
        self._groups = dividing_groups(self.module, plan, mesh)
        is_replicated = isinstance(module, DistributedDataParallel)
        self.loss_scale = LossScale(self._groups) if plan.precision == "fp16" else None
        # Gradients that stay in the replicas' buckets accumulate there; dropped ones would be allocated a second time.
        self._keeps_buckets = is_replicated and plan.num_microbatches > 1

    def run(self) -> Tensor | None:
        """The norm of the gradients where they are clipped; infinite where they are not finite and nothing was updated."""
        if self.host is not None and self.host.leaves_early:
            return self.host.step()
        self._settle()
        if self.loss_scale is not None and not self.loss_scale.unscale(self.module.parameters()):
            self._forget_gradients()
            return torch.tensor(torch.inf)
        norm = None if self.max_norm is None else self._clip(self.max_norm)
        if self.host is None:
            self.optimizer.step()
        else:
            self.host.step()
        self._forget_gradients()
        return norm

    def leave_out(self) -> None:
        """Nothing is learned from this step; what ranks owe each other of it is settled all the same."""
        self._settle()
        self._forget_gradients()

    def _settle(self) -> None:
        """Gradients are what they are on all ranks together."""
        if self.pipeline is not None:
            self.pipeline.finish_gradients()
        reduce_scalars(self.module)
        if self.split is not None:
            self.split.settle_gradients(self.module)
        drop_unused(self.module)

    def _clip(self, max_norm: float) -> Tensor:
        copies = self.pipeline.tied.second_copies() if self.pipeline is not None else ()
        return clip(axes_of_parameters(self.module, self.plan), max_norm, self._groups, copies)

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self._keeps_buckets)


def dividing_groups(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> dict[Axis, dist.ProcessGroup]:
    """Along each axis that divides gradients, the ranks that hold the other parts; pp last, which divides all of them."""
    groups, shards = axis_groups(module, mesh), shard_group(module)
    found: dict[Axis, dist.ProcessGroup] = {"tp": groups["tp"]} if plan.mesh.tp > 1 else {}
    if "ep" in groups and shards is None:
        found["ep"] = groups["ep"]
    if shards is not None:
        found["dp"] = shards
    return {**found, "pp": groups["pp"]} if plan.mesh.pp > 1 else found
