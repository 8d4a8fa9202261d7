"""Activations of chosen blocks wait on the host: the same gradients, and nothing of them on the device between the passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from cases import Case, plan_of, source_of
from pool import RankPool, this_rank
from torch import nn

from meshwright.core.errors import PlanError
from meshwright.core.names import compact_names, is_list_item
from meshwright.core.plan import Offload, Plan, Recompute
from meshwright.measure.parity import ParityResult, compare
from meshwright.rules.limits import not_yet
from meshwright.runtime.offload import activations
from meshwright.runtime.offload.activations import ActivationOffload
from meshwright.runtime.offload.link import open_link
from meshwright.runtime.offload.stash import HostStash

Pools = Callable[[int], RankPool]
CPU = torch.device("cpu")
SLOW_LINK = 2e7


def offloaded(plan: Plan) -> Plan:
    repeated = compact_names(tuple(name for name in plan.blocks if is_list_item(name)))
    return msgspec.structs.replace(plan, offload=Offload(activations=repeated))


def compare_on_rank(case: Case, num_steps: int) -> ParityResult:
    slow = partial(open_link, bytes_per_second=SLOW_LINK)
    with mock.patch.object(activations, "SMALLEST_BYTES", 0), mock.patch.object(activations, "open_link", slow):
        return compare(source_of(case.model).small(), offloaded(plan_of(case)), num_steps, this_rank())


@pytest.mark.parametrize("model", ["gpt", "tied", "llama", "gpt2", "t5", "resnet", "mixtral"])
def test_agrees_with_one_process(pool: Pools, model: str) -> None:
    for result in pool(1).run(compare_on_rank, Case(model, 0, "none", 2), 2):
        assert result.ok, result.first_difference


@pytest.mark.parametrize("zero", [0, 3])
def test_agrees_over_dp(pool: Pools, zero: int) -> None:
    for result in pool(2).run(compare_on_rank, Case("gpt", zero, "none", 2), 2):
        assert result.ok, result.first_difference


# ------------------------------------------------------------ what leaves, and when


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run(depth: int, most_in_flight: int = 2) -> tuple[Stack, HostStash, ActivationOffload]:
    module = Stack(depth).double()
    stash = HostStash(open_link(CPU, SLOW_LINK), CPU, depth, most_in_flight)
    offload = ActivationOffload(stash)
    for block in module.blocks:
        block.forward = offload.around(block.forward)  # type: ignore[method-assign]
    return module, stash, offload


@pytest.fixture(autouse=True)
def all_sizes() -> Any:
    with mock.patch.object(activations, "SMALLEST_BYTES", 0):
        yield


def test_between_the_passes_only_what_is_in_flight_is_on_the_device() -> None:
    found = {}
    for depth in (3, 9):
        module, stash, _ = run(depth)
        loss = module(torch.randn(64, 32, dtype=torch.float64, requires_grad=True)).sum()
        found[depth] = stash.device_bytes
        loss.backward()
        assert stash.device_bytes == 0, "all rooms are given back"
        stash.close()
        stash.link.close()
    assert found[3] == found[9] == 2 * 64 * 32 * 8


def test_a_tensor_that_is_saved_twice_leaves_once_and_parameters_stay() -> None:
    module, stash, offload = run(4)
    loss = module(torch.randn(64, 32, dtype=torch.float64)).square().sum()
    assert offload.num_kept == 4 + 4, "of each block the input of its product and that of its GELU"
    loss.backward()
    stash.close()
    stash.link.close()


def test_gradients_are_those_without() -> None:
    depth = 5
    module, stash, _ = run(depth)
    plain = Stack(depth).double()
    plain.load_state_dict(module.state_dict())
    x = torch.randn(64, 32, dtype=torch.float64)
    for _ in range(2):
        module.zero_grad()
        plain.zero_grad()
        module(x).square().sum().backward()
        plain(x).square().sum().backward()
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    stash.close()
    stash.link.close()


def test_without_gradients_nothing_leaves() -> None:
    module, stash, offload = run(3)
    with torch.no_grad():
        module(torch.randn(64, 32, dtype=torch.float64))
    assert offload.num_kept == 0
    stash.link.close()


def test_small_tensors_stay() -> None:
    with mock.patch.object(activations, "SMALLEST_BYTES", 2**20):
        module, stash, offload = run(3)
        module(torch.randn(64, 32, dtype=torch.float64)).sum().backward()
    assert offload.num_kept == 0
    stash.link.close()


# ------------------------------------------------------------ plans


def test_a_plan_gives_each_block_one_way() -> None:
    plan = offloaded(plan_of(Case("gpt"), 1))
    with pytest.raises(PlanError, match=r"'blocks.0' is both recomputed and has its activations offloaded"):
        msgspec.structs.replace(plan, recompute=(Recompute(mode="full", blocks=("blocks.0",)),))
    with pytest.raises(PlanError, match=r"offload.activations names block 'blocks.7'"):
        msgspec.structs.replace(plan, offload=Offload(activations=("blocks.7",)))
    assert not not_yet(plan)
    assert not_yet(msgspec.structs.replace(plan, compile=True))
