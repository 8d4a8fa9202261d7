"""Blocks that cut their tokens: of a model whose tokens are made by convolutions, and looked up nowhere.

A block of `Plan.token_blocks` takes its rank's part of the first tensor [samples, tokens, width] it is called with, where that is
whole along cp; what it hands on stays cut for the next block of its run. The last of a run gathers what it hands on. All else runs
on whole tensors, on every rank: patches before the first block, and heads, pools and losses behind the last.

    forward     narrow: nothing is sent              gather: all-gather
    backward    padded with zeros: a summand         reduce-scatter                    (runtime/split/exchange.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.core.names import expand_names
from meshwright.runtime._torch import DisableTorchFunction, tree_flatten, tree_unflatten
from meshwright.runtime.split.layout import Cut, cuts, layout_of
from meshwright.runtime.split.splitter import STREAM_DIMS, NotSplit, Splitter

AXIS: Axis = "cp"
TOKENS = 1
"""The dim of a stream along which tokens lie."""


class TokenBlocks:
    """The runs of a plan, as a Splitter meets their blocks."""

    def __init__(self, split: Splitter, runs: Iterable[str]) -> None:
        names = [expand_names([run]) for run in runs] if AXIS in split.axes else []
        self.split = split
        self.names = frozenset(name for run in names for name in run)
        self.ends = frozenset(run[-1] for run in names)
        self.met: set[str] = set()
        """Blocks that were called."""

    def entered(self, name: str, values: Any) -> Any:
        """What a block is called with, as it works on it: args and kwargs."""
        if name not in self.names:
            return values
        self.met.add(name)
        leaves, structure = tree_flatten(values)
        place = next((n for n, leaf in enumerate(leaves) if self._is_stream(leaf)), None)
        if place is None:
            raise NotSplit("it is to cut its tokens over cp, but is called with no tensor [samples, tokens, width]")
        if AXIS not in cuts(layout_of(leaves[place])):
            with DisableTorchFunction():  # as inside a rule
                leaves[place] = self.split.narrow(self.split.summed(leaves[place]), AXIS, Cut(TOKENS))
        return tree_unflatten(leaves, structure)

    def left(self, name: str, values: Any) -> Any:
        """What a block hands on."""
        if name not in self.ends:
            return values
        leaves, structure = tree_flatten(values)
        with DisableTorchFunction():
            return tree_unflatten([self._gathered(leaf) for leaf in leaves], structure)

    def _is_stream(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or leaf.dim() != STREAM_DIMS:
            return False
        return leaf.is_floating_point() and leaf.shape[0] == self.split.samples

    def _gathered(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        whole = self.split.summed(leaf)
        return self.split.gather(whole, AXIS) if AXIS in cuts(layout_of(whole)) else whole

    @contextmanager
    def followed(self, module: nn.Module) -> Iterator[None]:
        """The same by hooks, for a module without borders, until the end."""
        handles = [
            handle
            for name in self.names
            for handle in (
                module.get_submodule(name).register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                module.get_submodule(name).register_forward_hook(partial(self._after, name)),
            )
        ]
        try:
            yield
            if self.names and not self.met:
                raise NotSplit(
                    f"block '{min(self.names)}' is to cut its tokens over cp, but is never called as a module"
                )
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.entered(name, (args, kwargs))

    def _after(self, name: str, block: nn.Module, args: Any, output: Any) -> Any:
        return self.left(name, output)
