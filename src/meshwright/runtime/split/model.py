"""A model split over tp and cp: its weights cut, its blocks within borders, and the gradients that are summands added up."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.plan import Plan
from meshwright.models.objective import Objective
from meshwright.runtime._torch import DisableTorchFunction, tree_flatten, tree_unflatten
from meshwright.runtime.axis import along
from meshwright.runtime.clip import local
from meshwright.runtime.split.border import Border, draw_borders
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.splitter import Splitter
from meshwright.runtime.split.weights import cut_weights

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SplitModel:
    def __init__(self, splitter: Splitter, borders: list[Border], first_names: dict[str, str]) -> None:
        """first_names: of tied parameters, by each of their names. A stage may hold one of them, by another name."""
        self.splitter = splitter
        self._borders = borders
        self._first_names = first_names

    def carry_notes(self) -> None:
        """Layouts must survive the hooks of fully_shard."""
        for border in self._borders:
            border.carry_notes()

    def sync_buffers(self, module: nn.Module) -> None:
        """What batch norm keeps of channels that lie over ranks is this rank's for its own: all get all of it."""
        followed = self.splitter.statistics
        for buffer in module.buffers():
            if id(buffer) in followed:
                _, axis, cut = followed[id(buffer)]
                ranks = self.splitter.axes[axis]
                buffer.copy_(ranks.gather(ranks.own_part(buffer, cut), cut))

    def whole_loss(self, objective: Objective) -> Objective:
        """The objective with a loss that every rank has, also where it was left as summands."""
        return dataclasses.replace(
            objective, loss=lambda output, batch: whole_output(self.splitter, objective.loss(output, batch))
        )

    def settle_gradients(self, module: nn.Module) -> None:
        """Whole parameters that were read by work on parts: their gradients are added up over tp, in one call."""
        gradients = self._owed_gradients(module)
        if gradients:
            together = torch.cat([gradient.flatten() for gradient in gradients])
            with along("tp"):
                dist.all_reduce(together, group=self.splitter.axes["tp"].group)
            for gradient, summed in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def unsettle_gradients(self, module: nn.Module) -> None:
        """Sums become summands again: the first rank's, and zero on the others."""
        if self.splitter.axes["tp"].rank if "tp" in self.splitter.axes else 0:
            for gradient in self._owed_gradients(module):
                gradient.zero_()

    def _owed_gradients(self, module: nn.Module) -> list[Tensor]:
        return [local(parameter.grad) for parameter in self.owed(module) if parameter.grad is not None]

    def owed(self, module: nn.Module) -> list[nn.Parameter]:
        """Whole parameters of whose gradients each rank along tp has a summand, as far as forwards have shown."""
        owed = self.splitter.owed
        if not owed or "tp" not in self.splitter.axes:
            return []
        return [parameter for name, parameter in module.named_parameters() if self._first_names[name] in owed]


def split_model(module: nn.Module, plan: Plan, mesh: DeviceMesh) -> SplitModel | None:
    """None where neither tp nor cp divides the work."""
    axes = [
        Ranks(
            axis,
            getattr(plan.mesh, axis),
            mesh.get_local_rank(axis),
            mesh.get_group(axis),
            axis == "cp" and plan.context == "ring",
        )
        for axis in ("cp", "tp")
        if getattr(plan.mesh, axis) > 1
    ]
    if not axes:
        return None
    splitter = Splitter(axes, plan.sequence_parallel, plan.context)
    if "tp" in splitter.axes:
        cut_weights(module, plan, splitter.axes["tp"])
    named = list(module.named_parameters(remove_duplicate=False))
    by_parameter = {id(parameter): name for name, parameter in reversed(named)}
    first_names = {name: by_parameter[id(parameter)] for name, parameter in named}
    return SplitModel(splitter, draw_borders(module, plan.blocks, splitter, plan.token_blocks), first_names)


def whole_output(splitter: Splitter, output: Any) -> Any:
    """What a model returned, whole on every rank."""
    leaves, structure = tree_flatten(output)
    with DisableTorchFunction():
        whole = [splitter.whole(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(whole, structure)
