"""Rules for matmuls, convolutions and whatever else sums products: one rule, over the names of their dims.

    x[b s i] · W[o i] → y[b s o]      a letter for every dim; one that the result lacks is summed over

Along one axis:

    a letter of the result is cut      the result is cut there; what has the letter is narrowed to it
    a summed letter is cut             each rank has a summand of the result
    operands are cut at two letters    they are laid at one: at the weight's, for which an activation is gathered; or at one
                                       that both have and the result keeps (the heads, when queries and keys are cut by tokens);
                                       or, where the plan leaves heads alone, at the first's that the result keeps (the queries'),
                                       for which the other is gathered (keys, and values)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.runtime.split.laying import cut_as
from meshwright.runtime.split.layout import Addend, Cut, Layout, cuts, layout_of
from meshwright.runtime.split.saved import keeping_parts
from meshwright.runtime.split.splitter import NotSplit, Splitter

Run = Callable[[list[Tensor], Tensor | None], Tensor]
ROUNDS = 4


class Operands:
    """What a product reads, laid step by step so that each rank can do its part."""

    def __init__(self, split: Splitter, tensors: list[Tensor], letters: list[str], result: str) -> None:
        self.split, self.letters, self.result = split, letters, result
        self.parts = [split.summed(tensor) for tensor in tensors]
        self.read_by_parts: set[tuple[int, Axis]] = set()
        """Operands gathered along an axis so that backward adds up what the ranks find."""

    def run(self, work: Run, bias: Tensor | None) -> Tensor:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(keeping_parts(part))
            return work(self.parts, bias)

    def settle(self) -> Layout:
        """Along all axes, and how the result then lies. What is moved for one axis may gather what another cut along the same
        dim: that is settled anew."""
        order = [axis for part in self.parts for axis in (layout_of(part) or {})]
        for _ in range(ROUNDS):
            before = [id(part) for part in self.parts]
            found = {
                axis: self._settle(axis) for axis in sorted(self.split.axes)
            }  # cp before tp: along heads it cut last
            first = self._in_one_order()
            if [id(part) for part in self.parts] == before:
                shares = {axis: share for axis, share in found.items() if share is not None}
                self._lend(shares)
                return {axis: shares[axis] for axis in dict.fromkeys([*first, *order, *shares]) if axis in shares}
        raise NotSplit("a product of tensors that two axes cut along the same dims")

    def _lend(self, shares: Layout) -> None:
        for axis in shares:
            for number, part in enumerate(self.parts):
                if axis not in cuts(layout_of(part)) and (number, axis) not in self.read_by_parts:
                    self.parts[number] = self.split.lend(part, axis)

    def _cut(self, number: int, axis: Axis, cut: Cut) -> None:
        if (number, axis) in self.read_by_parts:
            raise NotSplit(f"a product for which an operand is gathered and cut along {axis}")
        part = self.parts[number]
        move = self.split.swap if axis in cuts(layout_of(part)) else self.split.narrow
        self.parts[number] = move(part, axis, cut)

    def _letters_at(self, axis: Axis) -> list[str | None]:
        """Where each operand is cut."""
        found = [cuts(layout_of(part)).get(axis) for part in self.parts]
        return [names[cut.dim] if cut else None for names, cut in zip(self.letters, found, strict=True)]

    def _settle(self, axis: Axis) -> Cut | Addend | None:
        found = self._letters_at(axis)
        present = list(dict.fromkeys(letter for letter in found if letter))
        if len(present) > 1:
            present = [self._at_one(axis, found)]
            found = self._letters_at(axis)
        if not present:
            return None
        letter = present[0]
        cut = self._cut_at(letter, axis, found)
        for number, names in enumerate(self.letters):
            if found[number] is not None:
                self._cut(number, axis, cut.at(names.index(letter)))
            elif letter in names and isinstance(self.parts[number], nn.Parameter) and letter not in self.result:
                return self._without(axis, found)
            elif letter in names:
                self._cut(number, axis, cut.at(names.index(letter)))
        return cut.at(self.result.index(letter)) if letter in self.result else Addend()

    def _cut_at(self, letter: str, axis: Axis, found: list[str | None]) -> Cut:
        """How the letter is cut: in a weight, else in the first that is cut there."""
        there = [part for part, at in zip(self.parts, found, strict=True) if at == letter]
        there.sort(key=lambda part: not isinstance(part, nn.Parameter))
        return next((cuts(layout_of(part))[axis] for part in there), Cut(0))

    def _at_one(self, axis: Axis, found: list[str | None]) -> str:
        """Operands cut at several letters, laid at one: returned."""
        at = list(zip(self.parts, found, strict=True))
        weight = next((letter for part, letter in at if letter and isinstance(part, nn.Parameter)), None)
        kept = next((letter for letter in found if letter and letter in self.result), None)
        in_ring = axis == "cp" and self.split.context == "ring" and kept
        target = weight or (kept if in_ring else None) or self._shared_letter(axis, found)
        cut = self._cut_at(target, axis, found)
        for number, names in enumerate(self.letters):
            if found[number] in (None, target):
                continue
            if target in names:
                self._cut(number, axis, cut.at(names.index(target)))
            else:
                self.parts[number] = self.split.gather(self.parts[number], axis, read_by_parts=True)
                self.read_by_parts.add((number, axis))
        return target

    def _shared_letter(self, axis: Axis, found: list[str | None]) -> str:
        """One that all operands have and the result keeps: where one is cut already, else the last such that divides."""
        shared = [letter for letter in self.result if all(letter in names for names in self.letters)]
        for letter in found:
            if letter in shared:
                return str(letter)
        for letter in reversed(shared):
            sizes = [part.shape[names.index(letter)] for part, names in zip(self.parts, self.letters, strict=True)]
            if all(size % self.split.axes[axis].num_pieces == 0 for size in sizes):
                return letter
        words = f"a product of tensors cut along different dims over {axis}={self.split.degrees[axis]}, and no dim of both divides"
        self.split.allow_gathering(axis, NotSplit(words))
        return next(
            (str(letter) for letter in found if letter and letter in self.result), str(next(filter(None, found)))
        )

    def _without(self, axis: Axis, found: list[str | None]) -> Cut | Addend | None:
        """A whole weight sums over what is cut: tokens are cut in its place along cp; along tp the tensor is gathered."""
        for number, (at, names) in enumerate(zip(found, self.letters, strict=True)):
            if at is None:
                continue
            if axis == "cp" and names[-2:-1] and names[-2] in self.result and self._tokens_divide(number, axis):
                runs = self.split.samples if len(names) == 2 else 1  # tokens of all samples in a row
                self._cut(number, axis, Cut(len(names) - 2, runs))
                return self._settle(axis)
            self.parts[number] = self.split.gather(self.parts[number], axis)
        return self._settle(axis)

    def _tokens_divide(self, number: int, axis: Axis) -> bool:
        names, part = self.letters[number], self.parts[number]
        runs = self.split.samples if len(names) == 2 else 1
        size, dim = part.shape[len(names) - 2], len(names) - 2
        others = [cut for other, cut in cuts(layout_of(part)).items() if cut.dim == dim and other != axis]
        return size % runs == 0 and self.split.divides(size // runs, axis, others)

    def _in_one_order(self) -> list[Axis]:
        """Letters that two axes cut are cut in the same order everywhere: the one that is returned."""
        first: list[Axis] = []
        for number, part in enumerate(self.parts):
            here = cuts(layout_of(part))
            if len({cut.dim for cut in here.values()}) == len(here):
                continue
            first = first or list(here)
            if list(here) != first:
                whole = self.split.gather_dims(part, range(part.dim()))
                self.parts[number] = cut_as(self.split, whole, {axis: here[axis] for axis in first})
        return first
