"""What is expected of the tensors that route tokens to experts: an even spread.

    choices   numbers below E           topk, argmax: E is the size of the dim they choose from
    density   share of a mask's truths  1/E for choices compared with one expert, 1/classes for a one-hot encoding;
                                        over a dim of r elements reduced by sum, any or max: min(1, r · density)
    counts    what the elements are     elements spread over bins for bincount and histc, truths of a mask for a sum

Each is known by storage, so views need no rules. A mask that is not from routing has density 1: all of it is true.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any, TypeVar

from torch import Tensor

from meshwright.capturing.storages import Storages

T = TypeVar("T")

ALL = Fraction(1)
_SAME = ("_to_copy", "clone", "ne", "gt", "copy_", "lift_fresh_copy", "masked_fill")
_ALIKE = ("mul", "index", "index_select")
"""A mask within a mask, as experts' capacity is one, and rows of a mask."""
_REDUCING = ("sum", "any", "amax", "max")
_COUNTING = ("bincount", "histc")


class Routing:
    def __init__(self, storages: Storages, num_samples: int) -> None:
        self.storages = storages
        self.num_samples = num_samples
        self.choices: dict[int, int] = {}
        self.densities: dict[int, Fraction] = {}
        self.counts: dict[int, tuple[int, int]] = {}
        """A total, and over how many elements it is spread."""

    def is_routing(self, mask: Tensor) -> bool:
        return self._number(mask) in self.densities

    def density(self, mask: Tensor) -> Fraction:
        return self.densities.get(self._number(mask), ALL)

    def is_count(self, tensor: Tensor) -> bool:
        return self._number(tensor) in self.counts

    def count(self, tensor: Tensor) -> int:
        """What one element of an integer tensor is taken to be."""
        number = self._number(tensor)
        if number not in self.counts:
            return min(1, self.choices.get(number, 2) - 1)
        total, bins = self.counts[number]
        place = int(tensor.storage_offset())
        return total * (place + 1) // bins - total * place // bins

    def num_true(self, mask: Tensor) -> int:
        """Counted per sample, so that the answers at two batch sizes lie on one line."""
        share, groups = self.density(mask), self.num_samples if mask.numel() % self.num_samples == 0 else 1
        return groups * ceil(mask.numel() // groups * share)

    def follow(self, name: str, arguments: tuple[Any, ...], outputs: list[Tensor]) -> None:
        """Learn from an op what its result is."""
        if name in ("topk", "argmax") and outputs[-1].dim():
            self._choose(name, arguments, outputs[-1])
        elif self.choices and arguments and isinstance(arguments[0], Tensor) and outputs:
            self._pass_on(name, arguments, outputs[0])

    def _choose(self, name: str, arguments: tuple[Any, ...], chosen: Tensor) -> None:
        position = 2 if name == "topk" else 1
        dim = arguments[position] if len(arguments) > position else -1
        if dim is not None:
            self.choices[self._number(chosen)] = arguments[0].shape[dim]

    def _pass_on(self, name: str, arguments: tuple[Any, ...], result: Tensor) -> None:
        source, made = self._number(arguments[0]), self._number(result)
        if name in (*_SAME, "sort"):
            _copy(self.choices, source, made)
            _copy(self.densities, source, made)
            _copy(self.counts, source, made)
        elif name in ("scatter", "scatter_") and self._number(arguments[2]) in self.choices:
            self.densities[made] = Fraction(arguments[2].numel(), result.numel())
        elif name in _ALIKE and source in self.densities and not result.is_floating_point():
            self.densities[made] = self.densities[source]
        elif name == "eq" and source in self.choices:
            self.densities[made] = Fraction(1, self._classes(arguments[0], result))
        elif name in _COUNTING and source in self.choices:
            self.counts[made] = (arguments[0].numel(), result.numel())
        elif name in _REDUCING and source in self.densities:
            total = self.densities[source] * arguments[0].numel()
            self.densities[made] = min(ALL, total / max(1, result.numel()))
            self.counts[made] = (int(total), max(1, result.numel()))

    def _classes(self, choices: Tensor, mask: Tensor) -> int:
        """A one-hot encoding has a dim of its own for the experts."""
        return mask.shape[-1] if mask.numel() > choices.numel() else self.choices[self._number(choices)]

    def _number(self, tensor: Tensor) -> int:
        stored = self.storages.find(tensor)
        return stored.number if stored else -1


def _copy(table: dict[int, T], source: int, made: int) -> None:
    if source in table:
        table[made] = table[source]
