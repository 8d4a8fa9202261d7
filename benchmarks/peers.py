"""The same GPT, spread by hand with plain torch, and by DeepSpeed: what ours is measured against.

Each function returns a step: forward, loss, backward, update on the calling rank's part of the batch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.gpt import GPT
from meshwright.models.source import ModelSource

Batch = dict[str, Tensor]
Step = Callable[[], Any]

adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loop(module: nn.Module, batch: Batch) -> Step:
    """A plain training loop around a module."""
    optimizer = adamw(module.parameters())

    def step() -> float:
        loss = loss_of(module(batch["input_ids"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def fully_sharded(source: ModelSource, batch: Batch) -> Step:
    from torch.distributed.fsdp import fully_shard

    module = source.build()
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=True)
    return loop(fully_shard(module, reshard_after_forward=False), batch)


def tensor_parallel(source: ModelSource, batch: Batch) -> Step:
    """Columns of q, k, v and the first MLP layer, rows of their followers; token table and head by vocabulary."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = source.build()
    assert isinstance(module, GPT)
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    in_block = {
        "attention": whole,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "mlp.expand": ColwiseParallel(),
        "mlp.contract": RowwiseParallel(),
    }
    for block in module.blocks:
        assert isinstance(block, nn.Module)
        block.attention.heads //= mesh.size()  # type: ignore[union-attr, operator]
        parallelize_module(block, mesh, in_block)
    ends = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, ends)
    split = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    others = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    optimizer = adamw([{"params": split}, {"params": others}])  # the fused kernel takes one kind of tensor at a time

    def step() -> float:
        with loss_parallel():
            loss = loss_of(module(batch["input_ids"]), batch["labels"])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class Part(nn.Module):
    """Half of a GPT, cut by hand."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        per_stage = len(model.blocks) // count
        self.blocks = nn.ModuleList(list(model.blocks)[index * per_stage : (index + 1) * per_stage])
        self.tokens = model.token_embedding if index == 0 else None
        self.positions = model.position_embedding if index == 0 else None
        self.norm = model.norm if index == count - 1 else None
        self.head = model.head if index == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipelined(source: ModelSource, batch: Batch, num_microbatches: int) -> Step:
    """torch's own Schedule1F1B; every rank is given the whole batch."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    model = source.build()
    assert isinstance(model, GPT)
    stage = PipelineStage(Part(model, rank, world), rank, world, torch.device("cpu"))
    optimizer = adamw(stage.submod.parameters())
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_of)

    def step() -> None:
        if rank == 0:
            schedule.step(batch["input_ids"])
        elif rank == world - 1:
            schedule.step(target=batch["labels"], losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed_zero3(source: ModelSource, batch: Batch) -> Step:
    import deepspeed

    module = source.build()
    settings = {
        "train_micro_batch_size_per_gpu": len(batch["input_ids"]),
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=adamw(module.parameters()), config=settings, dist_init_required=False
    )

    def step() -> float:
        loss = loss_of(engine(batch["input_ids"]), batch["labels"])
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step
