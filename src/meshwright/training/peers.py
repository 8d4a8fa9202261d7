"""Other libraries training the same model on the same batches: what a plan of ours is compared with.

Each peer prepares a module and an optimizer in its own way and says how it goes backward and updates; the loop around it, its
data, its seed and its learning rate are ours. What the libraries do themselves (clip, average, shard) is left to them.

torch-ddp        DistributedDataParallel                     deepspeed-zeroN    deepspeed.initialize with ZeRO stage N
torch-fsdp       fully_shard of every item of a list,        accelerate         Accelerator.prepare
                 then of the whole                           fabric             lightning.fabric's Fabric.setup
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from meshwright.core.errors import InputError, nearest
from meshwright.core.names import is_list_item
from meshwright.training.optimizers import make_optimizer
from meshwright.training.settings import Settings

PACKAGES = {
    "torch-ddp": "torch",
    "torch-fsdp": "torch",
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    "deepspeed-zero1": "deepspeed",
    "deepspeed-zero2": "deepspeed",
    "deepspeed-zero3": "deepspeed",
}
FAMILIES = {
    "torch": ("torch-ddp", "torch-fsdp"),
    "deepspeed": ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"),
}
LIKE = {"torch-fsdp": "zero3", "deepspeed-zero1": "zero1", "deepspeed-zero2": "zero2", "deepspeed-zero3": "zero3"}
"""Which plan of ours does the same; replicas where nothing is said."""


@dataclass(frozen=True)
class Peer:
    """A module that another library has prepared."""

    module: nn.Module
    optimizer: Optimizer
    update: Callable[[Tensor], None]
    """Backward from a loss, and the optimizer's step."""


def peers_named(text: str) -> list[str]:
    """`deepspeed,accelerate` → peers; a library's name means all its ways. One that is not installed is refused."""
    found: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        names = FAMILIES.get(word, (word,))
        for name in names:
            if name not in PACKAGES:
                raise InputError(f"--with {word}: {nearest(word, [*PACKAGES, *FAMILIES])}")
            if importlib.util.find_spec(PACKAGES[name]) is None:
                raise InputError(f"--with {word}: {PACKAGES[name]} is not installed: install it, or leave it out")
        found += names
    return list(dict.fromkeys(found))


def prepare(name: str, module: nn.Module, settings: Settings) -> Peer:
    """Every rank calls it, inside a process group."""
    makers: dict[str, Callable[[nn.Module, Settings], Peer]] = {
        "torch-ddp": _replicas,
        "torch-fsdp": _fully_sharded,
        "accelerate": _accelerate,
        "fabric": _fabric,
    }
    if name in makers:
        return makers[name](module, settings)
    return _deepspeed(module, settings, stage=int(name[-1]))


def _replicas(module: nn.Module, settings: Settings) -> Peer:
    return _plain(nn.parallel.DistributedDataParallel(module), settings)


def _fully_sharded(module: nn.Module, settings: Settings) -> Peer:
    from torch.distributed.fsdp import fully_shard

    for name, part in module.named_modules():
        if is_list_item(name) and not isinstance(part, nn.ModuleList):
            fully_shard(part)
    fully_shard(module)
    return _plain(module, settings)


def _plain(module: nn.Module, settings: Settings) -> Peer:
    optimizer = make_optimizer(module, settings)

    def update(loss: Tensor) -> None:
        loss.backward()
        _clip(module, settings)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(module, optimizer, update)


def _accelerate(module: nn.Module, settings: Settings) -> Peer:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    prepared, optimizer = accelerator.prepare(module, make_optimizer(module, settings))

    def update(loss: Tensor) -> None:
        accelerator.backward(loss)
        if settings.optimizer.clip_norm != "none":
            accelerator.clip_grad_norm_(prepared.parameters(), settings.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(prepared, optimizer, update)


def _fabric(module: nn.Module, settings: Settings) -> Peer:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    world = torch.distributed.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(accelerator=kind, devices=world, strategy="ddp", plugins=[TorchElasticEnvironment()])
    fabric.launch()
    prepared, optimizer = fabric.setup(module, make_optimizer(module, settings))

    def update(loss: Tensor) -> None:
        fabric.backward(loss)
        _clip(prepared, settings)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(prepared, optimizer, update)


def _deepspeed(module: nn.Module, settings: Settings, stage: int) -> Peer:
    import deepspeed

    assert settings.plan.global_batch is not None
    clip = settings.optimizer.clip_norm
    share = settings.plan.global_batch // torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": share,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({} if clip == "none" else {"gradient_clipping": clip}),
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=module, optimizer=make_optimizer(module, settings), config=config, dist_init_required=False
    )

    def update(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Peer(engine, optimizer, update)


def _clip(module: nn.Module, settings: Settings) -> None:
    if settings.optimizer.clip_norm != "none":
        clip_grad_norm_(module.parameters(), settings.optimizer.clip_norm)


def check_peer(name: str, settings: Settings, num_ranks: int) -> None:
    """What a peer cannot do is refused before ranks start."""
    wish: Any = settings.plan
    if settings.plan.global_batch is None or settings.plan.global_batch % num_ranks:
        raise InputError(f"{name} on {num_ranks}: the global batch does not divide over the ranks")
    if (wish.microbatch or 0) and wish.microbatch * num_ranks != wish.global_batch:
        raise InputError(f"{name} runs the global batch in one piece: leave plan.microbatch out")
    if wish.precision not in (None, "fp32"):
        raise InputError(f"{name} is compared in fp32: set plan.precision to fp32, or leave --with out")
