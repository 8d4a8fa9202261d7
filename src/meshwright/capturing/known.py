"""Values of what a forward computes from the batch's whole numbers and truth values alone.

Tensors of a trace have no values, but those of the batch do: a model that counts its image tokens, or looks for padding, asks for
what depends on them alone. Such a tensor is known by how it was made; its value is computed when it is asked for.

    known      the batch's whole numbers and truth values, constants in the module's code, factories (arange, full);
               a single number that is drawn (whether a layer is dropped) is its mean; no element is NaN
    made       by ops of known ones that draw nothing and write into nothing
    forgotten  whatever shares memory with a tensor that is written into

The values are those of the first sample in the place of every sample: traces with more samples must do more of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.capturing.opkinds import base_name
from meshwright.capturing.storages import Storages, key_of
from meshwright.runtime._torch import FakeTensor, tree_flatten, tree_leaves, tree_unflatten, unset_fake_temporarily

MOST_ELEMENTS = 1 << 24
"""Of a tensor whose value is computed."""

MEANS = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}
"""Of what an op draws."""

Make = Callable[[], Any]


class Known:
    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self._made: dict[Hashable, dict[Hashable, Make]] = {}
        """By storage, and by what of it a tensor covers."""

    def begin(self, batch: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Tensors of the batch with those that stand for them."""
        for tensor, stand_in in batch:
            if tensor.dim() and not tensor.is_meta and not tensor.is_floating_point() and not tensor.is_complex():
                self._remember(stand_in, _once(partial(_first_for_all, tensor)))

    def has(self, tensor: Any) -> bool:
        if not isinstance(tensor, FakeTensor):
            return isinstance(tensor, Tensor) and not tensor.requires_grad
        return _covered(tensor) in self._made.get(self._storage(tensor), {})

    def value(self, tensor: Tensor) -> Tensor:
        """Of a tensor that is known."""
        with unset_fake_temporarily():
            found: Tensor = self._make_of(tensor)()
        return found

    def num_true(self, mask: Tensor) -> int:
        """Of a mask that is known."""
        with unset_fake_temporarily():
            return int(self._make_of(mask)().count_nonzero())

    def follow(self, op: Any, arguments: tuple[Any, ...], options: dict[str, Any], outputs: list[Tensor]) -> None:
        """Learn from an op what its results are; they have been noticed by the storages."""
        if op._schema.is_mutable:
            self._forget(op, arguments, options)
            return
        if not outputs or base_name(op).startswith(("empty", "new_empty")):
            return
        if base_name(op) in MEANS and outputs[0].numel() == 1:
            self._remember(outputs[0], _once(partial(_filled, outputs[0], MEANS[base_name(op)])))
            return
        if _asks_for_nan(op, arguments):
            self._remember(outputs[0], _once(partial(_filled, outputs[0], 0.0)))
            return
        leaves, structure = tree_flatten((arguments, options))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in op.tags
        large = any(tensor.numel() > MOST_ELEMENTS for tensor in outputs)
        if draws or large or not all(map(self.has, given)):
            for tensor in outputs:  # of memory that an older one had
                self._made.get(self._storage(tensor), {}).pop(_covered(tensor), None)
            return
        makes = [self._make_of(leaf) if isinstance(leaf, Tensor) else _itself(leaf) for leaf in leaves]
        result = _once(lambda: _run(op, makes, structure))
        for position, tensor in enumerate(outputs):
            self._remember(tensor, partial(_one_of, result, position))

    def are_all_positions(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """What `nonzero` gives of a mask of this shape that is true everywhere."""
        if tensor.numel() <= MOST_ELEMENTS:
            self._remember(tensor, _once(lambda: torch.ones(shape, dtype=torch.bool).nonzero()))

    def _make_of(self, tensor: Tensor) -> Make:
        if not isinstance(tensor, FakeTensor):
            return _itself(tensor)
        return self._made[self._storage(tensor)][_covered(tensor)]

    def _remember(self, tensor: Tensor, make: Make) -> None:
        self._made.setdefault(self._storage(tensor), {})[_covered(tensor)] = make

    def _forget(self, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        for number, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = arguments[number] if number < len(arguments) else options.get(argument.name)
                for tensor in tree_leaves(written):
                    if isinstance(tensor, Tensor):
                        self._made.pop(self._storage(tensor), None)

    def _storage(self, tensor: Tensor) -> Hashable:
        stored = self.storages.find(tensor)
        return ("before", key_of(tensor)) if stored is None or stored.number < 0 else stored.number


def _covered(tensor: Tensor) -> Hashable:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _first_for_all(tensor: Tensor) -> Tensor:
    return tensor[:1].detach().cpu().expand(tensor.shape).clone()


def _asks_for_nan(op: Any, arguments: tuple[Any, ...]) -> bool:
    """`x.isnan()` is x ≠ x to torch."""
    is_other = base_name(op) == "ne" and len(arguments) == 2 and arguments[0] is arguments[1]
    return is_other or base_name(op) in ("isnan", "isinf")


def _filled(tensor: Tensor, value: float) -> Tensor:
    return torch.full(tensor.shape, value, dtype=tensor.dtype)


def _run(op: Any, makes: list[Make], structure: Any) -> list[Tensor]:
    arguments, options = tree_unflatten([make() for make in makes], structure)
    return [leaf for leaf in tree_leaves(op(*arguments, **options)) if isinstance(leaf, Tensor)]


def _one_of(result: Make, position: int) -> Any:
    return result()[position]


def _itself(value: Any) -> Make:
    return lambda: value


def _once(make: Make) -> Make:
    """Computed when it is first asked for."""
    found: list[Any] = []

    def value() -> Any:
        if not found:
            found.append(make())
        return found[0]

    return value
