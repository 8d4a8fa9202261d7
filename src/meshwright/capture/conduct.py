"""What is known of a followed block so that others like it can be skipped: how it was called, what it returned and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.capture.storages import Storages, storage_bytes
from meshwright.runtime._torch import tree_flatten

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Fresh:
    """A result the block made itself."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_stored: int
    dtype: torch.dtype
    requires_grad: bool
    kept: bool
    """Whether the block itself keeps it for backward."""

    def make(self) -> Tensor:
        if self.offset == 0 and prod(self.size) == self.num_stored:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return torch.empty(self.num_stored, dtype=self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Handed:
    """A result that is one of the block's inputs."""

    position: int


@dataclass(frozen=True)
class Conduct:
    block: str
    call: Call
    kept_inputs: frozenset[int]
    """Positions of the inputs it keeps for backward."""
    results: tuple[Any, ...]
    """Fresh, Handed, or a plain value."""
    structure: Any

    @property
    def fresh(self) -> list[Fresh]:
        return [result for result in self.results if isinstance(result, Fresh)]


@dataclass(frozen=True)
class Call:
    """What a block was called with, as far as it can matter. `plain`: whether that is all known."""

    structure: Any
    grad_enabled: bool
    leaves: tuple[Hashable, ...]
    plain: bool


def describe_call(block: str, leaves: list[Any], structure: Any) -> Call:
    """A number that is the block's own position in its container says nothing new."""
    position = block.rpartition(".")[2]
    plain = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
    described = tuple(_describe(leaf, position) for leaf in leaves)
    return Call(structure, torch.is_grad_enabled(), described, plain)


def _describe(leaf: Any, position: str) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    if type(leaf) is int and str(leaf) == position:
        return "position"
    return type(leaf), leaf if isinstance(leaf, _PLAIN) else None


class Observer:
    """Follows one call of a block and learns its conduct."""

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.first = storages.num_born
        self.saved: set[int] = set()

    def follow(self, forward: Callable[[], Any]) -> Any:
        with saved_tensors_hooks(self._save, lambda tensor: tensor):
            return forward()

    def conduct(self, block: str, call: Call, leaves: list[Any], result: Any) -> Conduct | None:
        """None where the block leaves behind what only following it would show."""
        outputs, structure = tree_flatten(result)
        results = tuple(self._result(output, leaves) for output in outputs)
        made = [self._number(one) for one, result in zip(outputs, results, strict=True) if isinstance(result, Fresh)]
        known = all(isinstance(result, (Fresh, Handed, *_PLAIN)) for result in results)
        left_behind = self.storages.born_since(self.first) - self.saved - set(made)
        if left_behind or not known or not made or len(set(made)) < len(made):
            return None
        kept = frozenset(at for at, leaf in enumerate(leaves) if self._number(leaf) in self.saved)
        return Conduct(block, call, kept, results, structure)

    def _result(self, output: Any, leaves: list[Any]) -> Any:
        for position, leaf in enumerate(leaves):
            if output is leaf and isinstance(leaf, Tensor):
                return Handed(position)
        number = self._number(output)
        if not isinstance(output, Tensor) or number < self.first:  # a plain value, or a view of something older
            return output
        return Fresh(
            size=tuple(output.shape), stride=output.stride(), offset=int(output.storage_offset()),
            num_stored=storage_bytes(output) // output.element_size(), dtype=output.dtype,
            requires_grad=output.requires_grad, kept=number in self.saved,
        )  # fmt: skip

    def _save(self, tensor: Tensor) -> Tensor:
        self.saved.add(self._number(tensor))
        return tensor

    def _number(self, leaf: Any) -> int:
        stored = self.storages.find(leaf) if isinstance(leaf, Tensor) else None
        return stored.number if stored else -2
