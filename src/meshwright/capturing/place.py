"""Where the step is: which block and which module inside it are at work.

In forward that is the innermost module whose forward runs. In backward it is the module whose forward made the autograd
node that runs: torch numbers nodes as it makes them, so the numbers at which modules are entered and left say whose a
node is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.capturing.blocks import block_of_parameter
from meshwright.core.graph import Phase
from meshwright.runtime._torch import _current_autograd_node, _get_sequence_nr

_NO_NUMBER = 2**63
"""Nodes that add up parameter gradients have no number of their own: theirs lies beyond this."""


class Spot(NamedTuple):
    block: str
    module: str
    """Inside the block."""

    @property
    def path(self) -> str:
        return ".".join(filter(None, self))


OUTSIDE = Spot("", "")


class Place:
    """Follows the step through the modules. Watches every call of a module between `watching` and its end."""

    def __init__(self, module: nn.Module, blocks: dict[str, bool]) -> None:
        self.phase: Phase = "forward"
        self.spots = {id(part): _spot(name, blocks) for name, part in module.named_modules()}
        self.running: list[tuple[int, Spot]] = [(0, OUTSIDE)]
        self.numbers, self.entered = [0], [OUTSIDE]
        self.last = OUTSIDE
        self.node = -1
        self.entered_blocks: dict[str, bool] = {}
        """In the order they are entered → whether they have been called as a whole."""
        self.left: Callable[[str, Any], None]

    @contextmanager
    def watching(self, left: Callable[[str, Any], None]) -> Iterator[None]:
        """left: told a block and what it returned, each time it has been called."""
        self.left = left
        handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_backward(self) -> None:
        self.phase = "backward"
        self.running = self.running[:1]

    def find(self) -> Spot:
        """Where the op that runs now belongs; in backward also notes which node it belongs to."""
        if self.phase == "forward" or len(self.running) > 1:
            self.last, self.node = self.running[-1][1], -1
            return self.last
        node = _current_autograd_node()
        number = node._sequence_nr() if node is not None else _NO_NUMBER
        if number < _NO_NUMBER:
            self.last, self.node = self.entered[bisect_right(self.numbers, number) - 1], number
        return self.last

    @property
    def stopped_at(self) -> str:
        """The full name of the module that ran last: where an error came from."""
        return (self.running[-1][1] if len(self.running) > 1 else self.last).path

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        spot = self.spots.get(id(module))
        if spot is not None:
            self.running.append((id(module), spot))
            if self.phase == "forward" and spot.block:
                called = not spot.module or self.entered_blocks.get(spot.block, False)
                self.entered_blocks[spot.block] = called
            self._mark()

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Calls that ended in an exception, which the module above caught, are left with it."""
        if not any(id(module) == entered for entered, _ in self.running):
            return
        while self.running[-1][0] != id(module):
            self.running.pop()
        spot = self.running[-1][1]
        if spot.block and not spot.module:
            self.left(spot.block, output)
        self.running.pop()
        self._mark()

    def _mark(self) -> None:
        self.last = self.running[-1][1]
        self.numbers.append(_get_sequence_nr())
        self.entered.append(self.last)


def _spot(name: str, blocks: dict[str, bool]) -> Spot:
    block = block_of_parameter(name, blocks)
    return Spot(block, name[len(block) :].removeprefix("."))
