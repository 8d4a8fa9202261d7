"""Parts of an optimizer: settings of now, in the group a parameter is in, and no search through all groups for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from meshwright.runtime.offload.optimizer_part import Parts, part_of, step_of_class


class Counted(list[nn.Parameter]):
    num_passes = 0

    def __iter__(self) -> Iterator[nn.Parameter]:
        Counted.num_passes += 1
        return super().__iter__()


def test_groups_are_gone_through_once_for_all_parts_of_a_step() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(40)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.param_groups[0]["params"] = Counted(parameters)
    parts = Parts(optimizer)
    Counted.num_passes = 0
    found = [parts.of(parameters[first : first + 4]) for first in range(0, 40, 4)]
    assert Counted.num_passes == 1
    assert [one for part in found for one in part.param_groups[0]["params"]] == parameters


def test_a_group_that_is_added_between_steps_is_found() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([first], lr=0.1)
    parts = Parts(optimizer)
    parts.of([first])
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    parts.forget()
    assert [group["params"] for group in parts.of([second]).param_groups] == [[], [second]]


def test_a_part_steps_its_own_parameters_with_the_rate_of_now() -> None:
    one, other, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [other], "lr": 0.5}], lr=0.1)
    one.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.param_groups[1]["lr"] = 0.25
    step_of_class(part_of(optimizer, [other, frozen]))
    assert one.tolist() == [1, 1]
    assert other.tolist() == [0.75, 0.75]
