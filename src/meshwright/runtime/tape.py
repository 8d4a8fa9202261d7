"""A tape: ops in the order they ran, on tensors without memory, so that any one tensor can be made for real later.

A tensor's value is made by playing, in order, the ops that wrote its memory, and those that wrote what they read:

    needed(m) = {op that made m} ∪ {ops that wrote m} ∪ needed(what those read, as it was then)        -> _needed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime._torch import FakeTensor
from meshwright.runtime.lesson import key_of, makes_nothing
from meshwright.runtime.rebuild import Call, Drawn, Maker, Part, map_leaves, tensors_in


class Tape:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.makers: dict[int, Maker] = {}
        """Storage → the call that made it, and which of its results."""
        self.writers: dict[Maker, list[int]] = defaultdict(list)

    def describe(self, op: Any, arguments: Any, options: dict[str, Any], drawn: Drawn | None) -> Call:
        """What it takes to run an op again. Tensors that have memory are kept as they are."""

        def part_of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return Part.place(leaf, self.makers[key_of(leaf)]) if isinstance(leaf, FakeTensor) else Part.of(leaf, None)

        return Call(len(self.calls), op, map_leaves(part_of, arguments), map_leaves(part_of, options), drawn)

    def add(self, call: Call, arguments: Any, options: dict[str, Any], result: Any) -> None:
        given, results = list(tensors_in([*arguments, *options.values()])), list(tensors_in(result))
        if makes_nothing(call.op, given, results):
            return
        self.calls.append(call)
        own = set(map(key_of, given))
        for place, tensor in enumerate(results):
            if key_of(tensor) not in own:
                self.makers[key_of(tensor)] = (call.number, place)
        for tensor in written(call.op, arguments, options):
            if isinstance(tensor, FakeTensor):
                self.writers[self.makers[key_of(tensor)]].append(call.number)

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor of this tape with memory and value, as it is now."""
        maker = self.makers[key_of(tensor)]
        with torch.no_grad():
            found = Part.place(tensor, maker).on(self._play(maker))
        # alone in its memory: a part of something larger would keep all of it
        return found if found.untyped_storage().nbytes() == found.numel() * found.element_size() else found.clone()

    def _play(self, wanted: Maker) -> Tensor:
        numbers = sorted(self._needed(wanted))
        last_read = {part.maker: number for number in numbers for part in self.calls[number].parts}
        made: dict[Maker | None, Tensor] = {}
        for number in numbers:
            call = self.calls[number]
            for place, tensor in enumerate(tensors_in(_run(call, made))):
                made.setdefault((number, place), tensor)
            for maker in [m for m in made if m != wanted and last_read.get(m, -1) <= number]:
                del made[maker]
        return made[wanted]

    def _needed(self, wanted: Maker) -> set[int]:
        found: set[int] = set()
        waiting = [wanted[0], *self.writers[wanted]]
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._before(number)
        return found

    def _before(self, number: int) -> Iterator[int]:
        """The calls that made what a call reads, as it was then."""
        for part in self.calls[number].parts:
            if part.maker is not None:
                yield part.maker[0]
                yield from (writer for writer in self.writers[part.maker] if writer < number)


def _run(call: Call, made: dict[Maker | None, Tensor]) -> Any:
    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, Part):
            return leaf
        return leaf.on(made[leaf.maker]) if leaf.tensor is None else leaf.tensor.clone()

    with call.drawn.again() if call.drawn else nullcontext():
        return call.op(*map_leaves(tensor_of, call.arguments), **map_leaves(tensor_of, call.options))


def written(op: Any, arguments: Any, options: dict[str, Any]) -> list[Tensor]:
    """The arguments that an op changes."""
    schema = op._schema.arguments
    named = {**dict(zip((one.name for one in schema), arguments, strict=False)), **options}
    changed = [named.get(one.name) for one in schema if one.alias_info is not None and one.alias_info.is_write]
    return list(tensors_in(changed))
