"""A Sketch: a copy of a module without memory, on which a forward is followed before it is cut.

Made before anything is done to the module, so that neither shards nor hooks nor recompute are in it. Parameters and blocks
work on fake tensors; what comes of the batch alone runs on its values, so that a forward that looks at its batch goes the way
it will go on every stage. Nothing is communicated: all ranks come to the same Steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.affine import Affine
from meshwright.core.errors import PlanError
from meshwright.core.flow import OBJECTIVE, OUTSIDE, Flow, FlowEvent, FlowTensor
from meshwright.models.objective import Batch, Objective, call
from meshwright.runtime._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from meshwright.models.follow import (
    Follower,
    give_number,
    is_in_place,
    is_one_of,
    number_of,
    results_of,
    tensors_in,
)
from meshwright.models.twins import separate
from meshwright.models.steps import Answer, Passed, Steps

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


class Sketch:
    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        known: dict[Hashable, Answer] | None = None,
    ) -> None:
        """dtype: what floating parameters have while the module computes. computing: what it computes in. known: where given,
        blocks of one class and size that are called alike are followed once for all; what they returned is kept in it."""
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.blocks = tuple(blocks)
        self.device = device
        self.computing = computing
        self.known = known
        self.module = self._copy(module, dtype)
        separate(self.module, self.blocks)
        self.names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for name in self.blocks:
            block = self.module.get_submodule(name)
            block.forward = partial(self._forward, name, block.forward)
        self._discovery: _Discovery | None = None

    def parameter(self, name: str) -> Tensor:
        """What stands in for a parameter, or a buffer, that another stage holds."""
        owner, _, leaf = name.rpartition(".")
        return getattr(self.module.get_submodule(owner), leaf)  # type: ignore[no-any-return]

    def train_like(self, module: nn.Module) -> None:
        for part, like in zip(self.module.modules(), module.modules(), strict=True):
            part.training = like.training

    def follow(self, batch: Batch, objective: Objective) -> Steps:
        """One forward and its loss, in the gradient mode of now."""
        discovery = self._discovery = _Discovery(self)
        try:
            with self.computing(), discovery:
                output = call(self.module, batch)
            discovery.objective(objective, output, batch)
        finally:
            self._discovery = None
        return discovery.steps()

    def block_of(self, parameter: str) -> str:
        return next((name for name in self.blocks if parameter.startswith(f"{name}.")), OUTSIDE)

    def _copy(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """The module's own code and settings; its tensors are only looked at."""
        made: dict[int, Any] = {}
        with self.fakes:
            for parameter in module.parameters():
                made[id(parameter)] = nn.Parameter(self._fake(parameter, dtype), parameter.requires_grad)
            for name in self.blocks:
                for buffer in module.get_submodule(name).buffers():
                    made[id(buffer)] = self._fake(buffer, dtype)
            for buffer in module.buffers():
                if buffer.is_meta:
                    made[id(buffer)] = self._fake(buffer, dtype)
        return copy.deepcopy(module, made)

    def _fake(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kept, device=self.device)

    def _forward(self, name: str, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        assert self._discovery is not None
        return self._discovery.block(name, forward, arguments, options)


class _Discovery(Follower):
    """Numbers what is made, and notes who reads it."""

    def __init__(self, sketch: Sketch) -> None:
        super().__init__(sketch.fakes)
        self.sketch = sketch
        self.tensors: list[FlowTensor] = []
        self.events: list[FlowEvent] = []
        self.names: list[str] = []
        self.answers: list[Answer | None] = []
        self.parameters: dict[str, int] = {}
        self.first_versions: dict[int, int] = {}
        for parameter in sketch.module.parameters():
            vars(parameter).pop("_meshwright_number", None)

    def steps(self) -> Steps:
        read = [
            FlowEvent(self.sketch.block_of(name), (), (number,)) for name, number in self.parameters.items()
        ]
        flow = Flow(tensors=tuple(self.tensors), events=(*read, *self.events))
        return Steps(flow, tuple(self.names), tuple(self.answers), self.parameters, self.first_versions)

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if not self.deaf:
            self._meet_parameters(tree_leaves((arguments, options or {})))
        return super().__torch_function__(function, types, arguments, options)

    def outside(self, function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
        try:
            result, leaves = self.on_shapes(function, arguments, options)
        except UNKNOWN as error:
            raise self._unknown(function, arguments, options) from error
        made = results_of(function, arguments, result)
        if not made:
            return result
        if function is Tensor.__setitem__ and number_of(made[0]) is None:
            raise PlanError(
                "the model cannot be cut: outside its blocks it writes a value that a block made into a tensor that came of the "
                "batch; make a new tensor of both instead, with torch.where or torch.cat"
            )
        numbers = self._note(OUTSIDE, getattr(function, "__name__", str(function)), leaves, made, None)
        for number, tensor in zip(numbers, made, strict=True):
            before = number_of(tensor)
            if is_in_place(function) and before is not None:
                self.first_versions[number] = self.first_versions.get(before, before)
            if is_in_place(function) or not is_one_of(tensor, leaves):
                give_number(tensor, number)
        return result

    def block(self, name: str, forward: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
        with self.not_following():
            kind = None if self.sketch.known is None else self._kind(name, arguments, options)
            given, result = self._answer(kind, arguments, options) or self._run_block(forward, arguments, options)
        own, _ = tree_flatten((arguments, options))
        leaves, structure = tree_flatten(result)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        left = tuple(
            Passed(next(at for at, one in enumerate(given) if one is leaf)) if is_one_of(leaf, given) else self._like(leaf)
            for leaf in leaves
        )
        answer = Answer(left, structure)
        for number, tensor in zip(self._note(name, name, own, made, answer), made, strict=True):
            if not is_one_of(tensor, given):
                give_number(tensor, number)
        if self.sketch.known is not None:
            self.sketch.known[kind] = answer
        return result

    def _answer(self, kind: Hashable, arguments: Any, options: dict[str, Any]) -> tuple[list[Any], Any] | None:
        """What a block like this one returned when it was called like this."""
        answer = self.sketch.known.get(kind) if self.sketch.known else None
        if answer is None:
            return None
        given = [self.stand_in(leaf) for leaf in tree_leaves((arguments, options))]
        leaves = [given[leaf.position] if isinstance(leaf, Passed) else self._made_like(leaf) for leaf in answer.leaves]
        return given, tree_unflatten(leaves, answer.structure)

    def _like(self, leaf: Any) -> Any:
        """A tensor of its own, which holds on to nothing."""
        if not isinstance(leaf, Tensor):
            return leaf
        with self.fakes:
            made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return made.requires_grad_(leaf.requires_grad)

    def _made_like(self, leaf: Any) -> Any:
        """As if a block had made it: it may be changed in place."""
        return self._like(leaf).clone() if isinstance(leaf, Tensor) else leaf

    def _kind(self, name: str, arguments: Any, options: dict[str, Any]) -> Hashable:
        block = self.sketch.module.get_submodule(name)
        leaves, structure = tree_flatten((arguments, options))
        sizes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())
        called = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in leaves
        )
        return type(block), sizes, called, str(structure)

    def objective(self, objective: Objective, output: Any, batch: Batch) -> None:
        """The last event reads what the loss reads of the output; all of it, where that cannot be followed."""
        read = tensors_in(output)
        reading = _Reading(self.fakes)
        try:
            with reading:
                objective.loss(output, batch)
            read = list(reading.found.values())
        except UNKNOWN:
            pass
        self._note(OBJECTIVE, OBJECTIVE, read, [], None)

    def _run_block(self, forward: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> tuple[list[Any], Any]:
        """What it was called with, without values, and what it returned.

        A block that asks for a value (which expert has tokens) is taken to return its first tensor as it came."""
        try:
            result, given = self.on_shapes(forward, arguments, options)
        except UNKNOWN:
            first = tensors_in((arguments, options))[0]
            with self.fakes:
                result = torch.empty_like(self.stand_in(first)).requires_grad_(torch.is_grad_enabled()).clone()
            given = []
        return given, result

    def _note(
        self, block: str, name: str, leaves: Iterable[Any], made: list[Tensor], answer: Answer | None
    ) -> tuple[int, ...]:
        reads = tuple(dict.fromkeys(number for leaf in leaves if (number := number_of(leaf)) is not None))
        first = len(self.tensors)
        self.tensors += [FlowTensor(_bytes(tensor), tensor.requires_grad) for tensor in made]
        numbers = tuple(range(first, len(self.tensors)))
        self.events.append(FlowEvent(block, reads, numbers))
        self.names.append(name)
        self.answers.append(answer)
        return numbers

    def _meet_parameters(self, leaves: Iterable[Any]) -> None:
        """A parameter that is read outside its block is a tensor like others."""
        for leaf in leaves:
            name = self.sketch.names.get(id(leaf))
            if name is not None and name not in self.parameters:
                self.parameters[name] = len(self.tensors)
                give_number(leaf, len(self.tensors))
                self.tensors.append(FlowTensor(_bytes(leaf), leaf.requires_grad))

    def _unknown(self, function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> PlanError:
        numbers = [number for leaf in tree_leaves((arguments, options)) if (number := number_of(leaf)) is not None]
        return PlanError(
            f"the model cannot be cut: outside its blocks it reads a value of what block '{self._maker(numbers[0])}' made "
            f"({getattr(function, '__name__', function)}), and stages that do not have it could not follow; "
            "move that into a block"
        )

    def _maker(self, number: int) -> str:
        """The block whose result a tensor comes of."""
        made = [event for event in self.events if number in event.makes]
        if not made or made[0].block:
            return made[0].block if made else OUTSIDE
        return next((block for read in made[0].reads if (block := self._maker(read))), OUTSIDE)


class _Reading(Follower):
    """Notes the numbered tensors that functions read; their results have no numbers."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__(fakes)
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        arguments, options = arguments, options or {}
        for leaf in tree_leaves((arguments, options)):
            number = number_of(leaf)
            if number is not None:
                self.found[number] = leaf
        result, _ = self.on_shapes(function, arguments, options)
        return result


def _bytes(tensor: Tensor) -> Affine:
    return Affine(float(tensor.numel() * tensor.element_size()), 0.0)
