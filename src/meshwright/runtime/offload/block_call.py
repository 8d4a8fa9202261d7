"""One call of a streamed block: run without keeping anything but its input, and run again in backward.

The graph of the user's code is cut at the block. What the block was *handed* is noted with the place it has in the graph before
the block; what it returned begins a graph of its own, whose gradients come to the call. Backward takes the calls of a forward in
reverse order: every gradient of what a call returned has come by then, since only later calls and the loss read it. What was
handed to several calls goes on backward once, after the first of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.core.errors import ModelError
from meshwright.models.own_recompute import own_recompute_left_out
from meshwright.runtime._torch import tree_flatten, tree_unflatten
from meshwright.runtime.offload.stash import Stash, Stashed
from meshwright.runtime.side_effects import Call, SideEffects


class Handed:
    """A tensor of the graph outside that blocks read: its values wait in the stash."""

    def __init__(self, tensor: Tensor, stash: Stash) -> None:
        self.edge: GradientEdge = get_gradient_edge(tensor)
        self.stashed: Stashed = stash.keep(tensor)
        self.gradient: Tensor | None = None

    def add(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient


class Tape:
    """The calls of one microbatch's forward, in order."""

    def __init__(self, stash: Stash, device: torch.device) -> None:
        self.stash, self.device = stash, device
        self.calls: list[BlockCall] = []
        self._handed: dict[int, tuple[Any, int, Handed]] = {}

    def run(
        self, name: str, forward: Callable[..., Any], arguments: Any, options: dict[str, Any], effects: SideEffects
    ) -> Any:
        """The block's results, at the beginning of a new graph. effects: of the block, which the second run does not repeat."""
        leaves, structure = tree_flatten((arguments, options))
        new: list[Handed] = []
        given = [self._hand(leaf, new) for leaf in leaves]
        begun = effects.begin((arguments, options))
        call = BlockCall(name, forward, given, structure, new, self.device, begun)
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        with torch.no_grad():
            result = forward(*arguments, **options)
        begun.end()
        if any(leaf._version != old for leaf, old in zip(leaves, versions, strict=True) if isinstance(leaf, Tensor)):
            raise ModelError(
                f"block '{name}' changes what it is given in place, and could not be run again from it: let it make a new tensor"
            )
        self.calls.append(call)
        return call.begin_graph(result)

    def _hand(self, leaf: Any, new: list[Handed]) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        known = self._handed.get(id(leaf))
        if known is not None and known[0]() is leaf and known[1] == leaf._version:
            return known[2]
        handed = Handed(leaf, self.stash)
        new.append(handed)
        self._handed[id(leaf)] = (weakref.ref(leaf), leaf._version, handed)
        return handed


class BlockCall:
    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        given: list[Any],
        structure: Any,
        new: list[Handed],
        device: torch.device,
        effects: Call,
    ) -> None:
        """given: what it was called with, `Handed` in place of tensors of the graph. new: those it is the first to be handed."""
        self.name, self.forward, self.given, self.structure, self.new = name, forward, given, structure, new
        self.gradients: dict[int, Tensor] = {}
        """Of what it returned, by number."""
        self.device, self.effects = device, effects
        self._random = _random_state(device)

    def begin_graph(self, result: Any) -> Any:
        leaves, structure = tree_flatten(result)
        numbers = [number for number, leaf in enumerate(leaves) if _carries_gradient(leaf)]
        anchor = torch.zeros((), requires_grad=True)  # without it torch would take the results for constants
        apply: Callable[..., tuple[Tensor, ...]] = _Beginning.apply
        begun = apply(anchor, self, numbers, [leaves[number].detach() for number in numbers])
        for number, tensor in zip(numbers, begun, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, structure)

    def request(self) -> None:
        """Begin to bring back what backward will need, should it come this way."""
        for one in self.given:
            if isinstance(one, Handed):
                one.stashed.request()

    def backward(self) -> None:
        """Gradients to the block's parameters, and to what made its input."""
        if self.gradients:
            self._run_again()
        ready = [handed for handed in self.new if handed.gradient is not None]
        if ready:
            torch.autograd.backward(
                [handed.edge for handed in ready],
                [handed.gradient for handed in ready],
                retain_graph=True,  # two tensors that blocks were handed may come of one: it goes when nothing refers to it
            )
        for handed in self.new:
            handed.stashed.drop()
            handed.gradient = None
        self.given, self.new, self.gradients = [], [], {}

    def _run_again(self) -> None:
        inputs: dict[int, tuple[Handed, Tensor]] = {}
        for one in self.given:
            if isinstance(one, Handed) and id(one) not in inputs:
                inputs[id(one)] = (one, one.stashed.take().requires_grad_())
        leaves = [inputs[id(one)][1] if isinstance(one, Handed) else one for one in self.given]
        arguments, options = tree_unflatten(leaves, self.structure)
        again = _drawing_again(self._random, self.device)
        with torch.enable_grad(), again, self.effects.as_before(), own_recompute_left_out():
            result, _ = tree_flatten(self.forward(*arguments, **options))
        reached = [number for number in self.gradients if result[number].requires_grad]
        if reached:
            torch.autograd.backward([result[n] for n in reached], [self.gradients[n] for n in reached])
        for handed, tensor in inputs.values():
            handed.add(tensor.grad)


class _Beginning(torch.autograd.Function):
    """Tensors without a past; their gradients go to the call that made them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, call: BlockCall, numbers: list[int], tensors: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.numbers = call, numbers
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        for number, gradient in zip(ctx.numbers, gradients, strict=True):
            if gradient is not None:
                known = ctx.call.gradients.get(number)
                ctx.call.gradients[number] = gradient if known is None else known + gradient
        return None, None, None, None


def _carries_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    own = (torch.get_rng_state(),)
    return (*own, torch.cuda.get_rng_state(device)) if device.type == "cuda" else own


@contextmanager
def _drawing_again(state: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    """The random numbers of the first run, without a trace afterwards."""
    now = _random_state(device)
    _set_random_state(state, device)
    try:
        yield
    finally:
        _set_random_state(now, device)


def _set_random_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
