"""What is known of a followed block so that others like it can be skipped: how it was called, what it returned and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.capturing.storages import Storages, storage_bytes
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
    left_behind: frozenset[int]
    """Storages that outlive the call, though it neither returned them nor keeps them for backward."""
    added_to: dict[int, int]
    """Positions of inputs that the block only adds something to → which of its fresh results that is: backward hands the
    gradient of the result back as that of the input."""

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
        """None where only following the block would show what it does."""
        outputs, structure = tree_flatten(result)
        results = tuple(self._result(output, leaves) for output in outputs)
        made = [self._number(one) for one, result in zip(outputs, results, strict=True) if isinstance(result, Fresh)]
        known = all(isinstance(result, (Fresh, Handed, *_PLAIN)) for result in results)
        if not known or not made or len(set(made)) < len(made):
            return None
        kept = frozenset(at for at, leaf in enumerate(leaves) if self._number(leaf) in self.saved)
        left_behind = self.storages.born_since(self.first) - self.saved - set(made)
        fresh = [output for output, result in zip(outputs, results, strict=True) if isinstance(result, Fresh)]
        return Conduct(block, call, kept, results, structure, frozenset(left_behind), _added_to(leaves, fresh))

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


def _added_to(leaves: list[Any], fresh: list[Tensor]) -> dict[int, int]:
    """Inputs that nothing of the block reads but the sum that is one of its results."""
    edges = _edges(fresh)
    found = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            own = (leaf.grad_fn, leaf.output_nr)
            sums = [number for number, made in enumerate(fresh) if made.shape == leaf.shape and _adds(made, own)]
            if edges[own] == len(sums) == 1:
                found[position] = sums[0]
    return found


def _adds(made: Tensor, own: tuple[Any, int]) -> bool:
    return type(made.grad_fn).__name__ == "AddBackward0" and own in made.grad_fn.next_functions  # type: ignore[union-attr]


def _edges(results: list[Tensor]) -> Counter[tuple[Any, int]]:
    """How often each result of autograd's nodes is read on the way to these; a node before the block is walked too."""
    found: Counter[tuple[Any, int]] = Counter()
    waiting, seen = [made.grad_fn for made in results if made.grad_fn is not None], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            found.update(node.next_functions)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return found
