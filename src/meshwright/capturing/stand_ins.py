"""Fake tensors that stand in for a module's own and for the batch, in the dtypes the precision stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capturing.blocks import block_of_parameter
from meshwright.core.graph import Casting, Precision
from meshwright.models.faked.attributes import fake_attributes, plain_tensors
from meshwright.models.objective import Batch, map_batch
from meshwright.models.wide_losses import WideLosses

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What 16-bit precision computes in."""


@dataclass(frozen=True)
class Arithmetic:
    """What a module computes in, and how it gets there (core.graph.Casting)."""

    precision: Precision = "fp32"
    casting: Casting = "autocast"

    @property
    def stored(self) -> torch.dtype:
        """What parameters have while the module runs."""
        if self.precision in LOWER and self.casting == "parameters":
            return LOWER[self.precision]
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def casts_inputs(self) -> bool:
        """Floating inputs follow an fp64 model and one with 16-bit parameters, as in the runtime."""
        return self.stored != torch.float32

    def computing(self) -> AbstractContextManager[Any]:
        """Mixed precision as the runtime has it: autocast around forward and loss.

        Casts are not cached: the cache would keep small casts alive to the end of forward, away from the block they are of.
        """
        if self.precision in LOWER and self.casting == "autocast":
            return torch.autocast("cpu", dtype=LOWER[self.precision], cache_enabled=False)
        return WideLosses() if self.precision in LOWER else nullcontext()


def stand_ins(named: dict[str, Tensor], arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Tied ones shared. Called inside the fake mode."""
    made: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in made:
            stored = stored_dtype(tensor, arithmetic)
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=stored, device="cpu")
            made[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    return {name: made[id(tensor)] for name, tensor in named.items()}


def parameters_of(module: nn.Module, skipped: set[str]) -> dict[str, Tensor]:
    """Without those of blocks that will not be followed."""
    return _outside(skipped, module.named_parameters(remove_duplicate=False))


def buffers_of(module: nn.Module, skipped: set[str]) -> dict[str, Tensor]:
    return _outside(skipped, module.named_buffers(remove_duplicate=False))


def _outside(skipped: set[str], named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named if not skipped or block_of_parameter(name, skipped) == ""}


def buffer_bytes(module: nn.Module, arithmetic: Arithmetic) -> int:
    """Of all blocks, also of those that will not be followed."""
    return sum(buffer.numel() * stored_dtype(buffer, arithmetic).itemsize for buffer in module.buffers())


def stored_dtype(tensor: Tensor, arithmetic: Arithmetic) -> torch.dtype:
    return arithmetic.stored if tensor.is_floating_point() else tensor.dtype


def fake_batch(batch: Batch, arithmetic: Arithmetic) -> Batch:
    def replace(tensor: Tensor) -> Tensor:
        dtype = stored_dtype(tensor, arithmetic) if arithmetic.casts_inputs else tensor.dtype
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")

    return map_batch(replace, batch)


@contextmanager
def faked_attributes(module: nn.Module, arithmetic: Arithmetic) -> Iterator[None]:
    """Tensors that are plain attributes stay as they are in every precision but fp64, in which a model is compared whole."""
    before = list(plain_tensors(module))
    fake_attributes(module, torch.float64 if arithmetic.precision == "fp64" else None)
    try:
        yield
    finally:
        for attributes, name, tensor in before:
            attributes[name] = tensor
