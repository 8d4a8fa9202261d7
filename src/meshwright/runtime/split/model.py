"""A model split over tp and cp: its weights cut, its blocks within borders, and the gradients that are summands added up."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.plan import Plan
from meshwright.runtime._torch import tree_flatten, tree_unflatten
from meshwright.runtime.clip import local
from meshwright.runtime.split.border import Border, draw_borders
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.splitter import Splitter
from meshwright.runtime.split.weights import cut_weights


class SplitModel:
    def __init__(self, splitter: Splitter, borders: list[Border]) -> None:
        self.splitter = splitter
        self._borders = borders

    def carry_notes(self) -> None:
        """Layouts must survive the hooks of fully_shard."""
        for border in self._borders:
            border.carry_notes()

    def settle_gradients(self, module: nn.Module) -> None:
        """Whole parameters that were read by work on parts: their gradients are added up over tp, in one call."""
        owed = self.splitter.owed
        if not owed or "tp" not in self.splitter.axes:
            return
        gradients = [
            local(parameter.grad)
            for name, parameter in module.named_parameters()
            if name in owed and parameter.grad is not None
        ]
        if gradients:
            together = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(together, group=self.splitter.axes["tp"].group)
            for gradient, summed in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))


def split_model(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> SplitModel | None:
    """None where neither tp nor cp divides the work."""
    axes = [
        Ranks(axis, getattr(plan.mesh, axis), mesh.get_local_rank(axis), mesh.get_group(axis))
        for axis in ("cp", "tp")
        if getattr(plan.mesh, axis) > 1
    ]
    if not axes:
        return None
    splitter = Splitter(axes, plan.sequence_parallel)
    if "tp" in splitter.axes:
        cut_weights(module, plan, splitter.axes["tp"])
    return SplitModel(splitter, draw_borders(module, plan.blocks, splitter))


def whole_output(splitter: Splitter, output: Any) -> Any:
    """What a model returned, whole on every rank."""
    leaves, structure = tree_flatten(output)
    whole = [
        splitter.gather_dims(splitter.summed(leaf), range(leaf.dim())) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return tree_unflatten(whole, structure)
