"""A part of an optimizer: its class, settings, state and hooks, over some of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class Parts:
    """The parts of one optimizer. Its groups are gone through once for all parts of a step: a part for each of hundreds of blocks
    would else go through the parameters of hundreds of blocks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of: dict[int, int] = {}
        """Number of the group that a parameter is in, by its id."""

    def of(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """With the settings of now."""
        groups = self.optimizer.param_groups
        if not self._group_of:
            self._group_of = {id(one): number for number, group in enumerate(groups) for one in group["params"]}
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        for parameter in parameters:
            if id(parameter) in self._group_of:
                members[self._group_of[id(parameter)]].append(parameter)
        part: Optimizer = object.__new__(type(self.optimizer))
        vars(part).update(vars(self.optimizer))
        part.param_groups = [{**group, "params": own} for group, own in zip(groups, members, strict=True)]
        return part

    def forget(self) -> None:
        """A step is over: groups may be changed before the next."""
        self._group_of = {}


def part_of(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Parts(optimizer).of(parameters)


def step_of_class(optimizer: Optimizer) -> None:
    """The class's own step: a scheduler puts a wrapper of the whole optimizer's step on the object."""
    step: Any = type(optimizer).step
    step(optimizer)
