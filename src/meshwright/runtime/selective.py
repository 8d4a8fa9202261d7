"""Selective recompute: a block keeps what it keeps, but for what lies inside its attention core; backward makes that again.

The block runs as it is, whatever the model. A dispatch mode sees its ops below autograd, and hooks see what autograd saves.
The first run of a block learns, by the rule that capture marks graphs with (rules/attention.py):

    core      ops between the projections
    dropped   what core ops made and autograd saved, unless something behind the core reads it too     -> lesson.learn
    redone    core ops that the dropped is made of, in order and with the same random numbers           -> Core.rebuild

and drops in the end; later runs drop at once. torch's own selective checkpoint keeps the result of every op that is not redone,
whether backward needs it or not; this keeps what autograd saves, and what the redone ops read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.runtime._torch import TorchDispatchMode, tree_leaves
from meshwright.runtime.lesson import Lesson, Notes, is_plain, key_of, learn, makes_nothing
from meshwright.runtime.rebuild import Call, Core, Drawn, Maker, Part, map_leaves, tensors_in
from meshwright.runtime.watch import Watch


def selective(block: nn.Module, name: str, watch: Watch) -> Callable[..., Any]:
    """The block's forward, whose attention core is not kept."""
    forward = block.forward
    lesson: Lesson | None = None

    @wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        nonlocal lesson
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        follower = _Learner(Core(name, watch), block) if lesson is None else _Follower(Core(name, watch), lesson)
        output, lesson = follower.follow(partial(forward, *arguments, **options))
        return output

    return run


class _Follower(TorchDispatchMode):
    """Sees the ops of one run of a block that is known, and keeps nothing of its core."""

    def __init__(self, core: Core, lesson: Lesson | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.core, self.lesson = core, lesson
        self.number = 0
        self.makers: dict[int, Maker] = {}
        """Storage → the op that made it, and which of its results."""
        self.supports_higher_order_operators = True

    def follow(self, forward: Callable[[], Any]) -> tuple[Any, Lesson | None]:
        """What the block returns, and what is known of it now: nothing, where it went another way than before."""
        with saved_tensors_hooks(self.pack, unpack), self:
            output = forward()
        return output, self.lesson

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        call = self.call(op, arguments, options)
        result = op(*arguments, **options)
        given, results = list(tensors_in([*arguments, *options.values()])), list(tensors_in(result))
        if not makes_nothing(op, given, results):
            self.ran(op, call, given, results)
        return result

    def call(self, op: Any, arguments: Any, options: dict[str, Any]) -> Call | None:
        """What it takes to run an op again, if that may be wanted."""
        lesson, number = self.lesson, self.number
        if lesson is None or number not in lesson.redone or not lesson.agrees(number, op):
            return None
        call = self._describe(op, arguments, options)
        _forget(call, lesson)
        return call

    def _describe(self, op: Any, arguments: Any, options: dict[str, Any]) -> Call:
        def part_of(leaf: Any) -> Any:
            return Part.of(leaf, self.makers.get(key_of(leaf))) if isinstance(leaf, Tensor) else leaf

        drawn = Drawn.before(op, arguments, options)
        return Call(self.number, op, map_leaves(part_of, arguments), map_leaves(part_of, options), drawn)

    def ran(self, op: Any, call: Call | None, given: list[Tensor], results: list[Tensor]) -> None:
        if self.lesson is not None and not self.lesson.agrees(self.number, op):
            self.lesson = None
        elif call is not None:
            self.core.calls.append(call)
        self.number_results(given, results)

    def number_results(self, given: list[Tensor], results: list[Tensor]) -> None:
        own = set(map(key_of, given))
        for place, tensor in enumerate(results):
            if key_of(tensor) not in own:
                self.makers[key_of(tensor)] = (self.number, place)
        self.number += 1

    def pack(self, tensor: Tensor) -> Tensor | Part:
        maker = self.makers.get(key_of(tensor))
        if self.lesson is None or maker is None or maker[0] not in self.lesson.dropped or not is_plain(tensor):
            return tensor
        part = Part.of(tensor, maker)
        self.core.drop(part)
        return part


class _Learner(_Follower):
    """Sees the first run of a block: holds on to what it might need until the core is known."""

    def __init__(self, core: Core, block: nn.Module) -> None:
        super().__init__(core, None)
        self.notes = Notes(block)
        self.packed: list[Part] = []

    def follow(self, forward: Callable[[], Any]) -> tuple[Any, Lesson | None]:
        with self.notes.following():
            output, _ = super().follow(forward)
        returned = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        handed_on = {maker for tensor in returned if (maker := self.makers.get(key_of(tensor)))}
        saved = {part.maker for part in self.packed if part.maker is not None}
        lesson = learn(self.notes, handed_on, saved, self.core.block)
        self._settle(lesson)
        return output, lesson

    def call(self, op: Any, arguments: Any, options: dict[str, Any]) -> Call | None:
        return self._describe(op, arguments, options)

    def ran(self, op: Any, call: Call | None, given: list[Tensor], results: list[Tensor]) -> None:
        assert call is not None
        self.core.calls.append(call)
        self.number_results(given, results)
        self.notes.note(op, given, results, self.makers)

    def pack(self, tensor: Tensor) -> Tensor | Part:
        maker = self.makers.get(key_of(tensor))
        if maker is None or not is_plain(tensor):
            return tensor
        self.packed.append(Part.of(tensor, maker))
        return self.packed[-1]

    def _settle(self, lesson: Lesson) -> None:
        self.core.calls = [call for call in self.core.calls if call.number in lesson.redone]
        for call in self.core.calls:
            _forget(call, lesson)
        for part in self.packed:
            if part.maker is not None and part.maker[0] in lesson.dropped:
                self.core.drop(part)
        self.packed.clear()  # autograd holds this object as long as its graph lives


def _forget(call: Call, lesson: Lesson) -> None:
    """What is made again need not be kept to make others."""
    for part in call.parts:
        if part.maker is not None and part.maker[0] in lesson.redone:
            part.tensor = None


def unpack(packed: Tensor | Part) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if packed.tensor is None:
        assert packed.core is not None
        packed.core.rebuild()
    assert packed.tensor is not None
    return packed.tensor
