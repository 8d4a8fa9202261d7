"""Tied tensors that lie on several stages: one value, and the sum of their gradients on each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.plan import Plan
from meshwright.runtime.clip import local
from meshwright.runtime.communicators import tied_group
from meshwright.runtime.pipeline.cut import Tie


class TiedTensors:
    """Of one coordinate; the first stage's name of a tie leads."""

    def __init__(self, module: nn.Module, ties: tuple[Tie, ...], plan: Plan, mesh: DeviceMesh) -> None:
        self.module = module
        self.here = mesh.get_local_rank("pp")
        self.places = [{stage: plan.stages[stage].coordinate for stage in tie.names} for tie in ties]
        self.ties = ties
        sets = dict.fromkeys(tuple(sorted(set(places.values()))) for places in self.places)
        self.groups = {places: tied_group(places, mesh) for places in sets if len(places) > 1}
        """Pp coordinates → the ranks beside this one there; every rank makes all of them."""

    def copy_first(self) -> None:
        """Every copy starts as the first stage's; before the tensors are sharded."""
        for tie, places in zip(self.ties, self.places, strict=True):
            own, group = self._own(tie, places), self._group_of(places)
            if not own:
                continue
            if group is not None:
                source = sorted(set(places.values())).index(places[min(places)])
                dist.broadcast(own[0].detach(), group=group, group_src=source)
            for parameter in own[1:]:
                parameter.detach().copy_(own[0])

    def add_gradients(self) -> None:
        """Once a step, after dp has added up its own."""
        for tie, places in zip(self.ties, self.places, strict=True):
            own, group = self._own(tie, places), self._group_of(places)
            if not own or not tie.trainable:
                continue
            total = _gradient(own[0])
            for parameter in own[1:]:
                total += _gradient(parameter)
            if group is not None:
                dist.all_reduce(total, group=group)
            for parameter in own[1:]:
                _gradient(parameter).copy_(total)

    def second_copies(self) -> list[nn.Parameter]:
        """Parameters of this rank whose first copy is elsewhere: a norm counts the first."""
        return [
            self.module.get_parameter(name)
            for tie, places in zip(self.ties, self.places, strict=True)
            for stage, name in tie.names.items()
            if places[stage] == self.here and stage != min(places)
        ]

    def _own(self, tie: Tie, places: dict[int, int]) -> list[nn.Parameter]:
        return [self.module.get_parameter(name) for stage, name in tie.names.items() if places[stage] == self.here]

    def _group_of(self, places: dict[int, int]) -> dist.ProcessGroup | None:
        return self.groups.get(tuple(sorted(set(places.values()))))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part; zero where nothing used it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
