"""Fakes of a module's tensors: blocks that are alike and cut alike share them, in whatever order they are called."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.core.plan import BlockSharding, Mesh, Plan, Stage, TensorSharding
from meshwright.runtime._torch import FakeTensorMode
from meshwright.runtime.split.faked import faked, first_alike


class Backwards(nn.Module):
    """Its blocks run from the last to the first; one of four is wider inside, and two read one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for width in (4, 4, 8, 4))
        self.blocks[3][1].weight = self.blocks[0][1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def plan_of(*sharding: BlockSharding) -> Plan:
    blocks = tuple(f"blocks.{number}" for number in (3, 2, 1, 0))
    return Plan(
        model="backwards",
        mesh=Mesh(tp=2),
        stages=(Stage(coordinate=0, blocks=blocks),),
        sharding=sharding,
        microbatch=1,
        num_microbatches=1,
        global_batch=1,
    )


def test_blocks_that_are_alike_share_fakes() -> None:
    module = Backwards()
    alike = first_alike(module, plan_of())
    assert alike == {"blocks.1": "blocks.3", "blocks.0": "blocks.3"}
    with FakeTensorMode():
        found = faked(module, alike)
        apart = faked(module)
    assert found.keys() == apart.keys()
    assert {name: tensor.shape for name, tensor in found.items()} == {name: one.shape for name, one in apart.items()}
    assert found["blocks.0.0.weight"] is found["blocks.3.0.weight"]
    assert found["blocks.2.0.weight"] is not found["blocks.3.0.weight"]
    assert apart["blocks.0.0.weight"] is not apart["blocks.3.0.weight"]
    assert apart["blocks.0.1.weight"] is apart["blocks.3.1.weight"]


def test_blocks_that_are_cut_otherwise_do_not() -> None:
    cut = TensorSharding(tensor="0.weight", dims=("tp", ""))
    plan = plan_of(BlockSharding(for_blocks=("blocks.0",), tensors=(cut,)))
    assert first_alike(Backwards(), plan) == {"blocks.1": "blocks.3"}
