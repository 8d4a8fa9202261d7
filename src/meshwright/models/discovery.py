"""The discovery of what flows between blocks: numbers what is made, and notes who reads it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import PlanError
from meshwright.core.flow import OBJECTIVE, OUTSIDE, Affine, Flow, FlowEvent, FlowTensor
from meshwright.models.effects import Effects, as_list, find_effects
from meshwright.models.follow import (
    NUMBER,
    Follower,
    give_number,
    is_in_place,
    is_one_of,
    number_of,
    results_of,
    tensors_in,
)
from meshwright.models.function_around import refuse_inside_function
from meshwright.models.location import line_now
from meshwright.models.objective import Batch, Objective
from meshwright.models.snapshot import Snapshot
from meshwright.models.steps import Answer, Passed, Steps
from meshwright.models.written_buffers import WrittenBuffers
from meshwright.runtime._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

if TYPE_CHECKING:
    from meshwright.models.sketch import Sketch

MADE_AT = "_meshwright_made_at"
"""On a tensor with a gradient that a block makes: which call of a block it was."""
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


class Discovery(Follower):
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
            vars(parameter).pop(NUMBER, None)
        self.buffers, self.met_before = WrittenBuffers(sketch.module), set[int]()
        self.written = {_memory(parameter): name for name, parameter in sketch.module.named_parameters()}

    def steps(self) -> Steps:
        read = [FlowEvent(self.sketch.block_of(name), (), (number,)) for name, number in self.parameters.items()]
        flow = Flow(tensors=tuple(self.tensors), events=(*read, *self.events))
        return Steps(flow, tuple(self.names), tuple(self.answers), self.parameters, self.first_versions)

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if not self.deaf:
            leaves = tree_leaves((arguments, options or {}))
            self._check_writes(function, arguments)
            self._meet_parameters(leaves)
            self.met_before = set(self.buffers.touched)
            self.buffers.meet(leaves)
            if any(map(self._is_stray, leaves)):
                last = next((name for name in reversed(self.names) if name in self.sketch.blocks), OUTSIDE)
                raise self._stray(_name(function), f"after block '{last}' it")
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
        if is_in_place(function):
            self.buffers.check_write(arguments[0], _name(function), self.met_before)
        numbers = self._note(OUTSIDE, getattr(function, "__name__", str(function)), leaves, made, None)
        for number, tensor in zip(numbers, made, strict=True):
            before = number_of(tensor)
            if is_in_place(function) and before is not None:
                self.first_versions[number] = self.first_versions.get(before, before)
            if is_in_place(function) or not is_one_of(tensor, leaves):
                give_number(tensor, number)
        return result

    def block(self, name: str, forward: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
        """A call of a block."""
        refuse_inside_function(name)
        with self.not_following():
            return self._block(name, forward, arguments, options)

    def _block(self, name: str, forward: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
        given, result, followed, hidden = self._run(name, forward, arguments, options)
        own, _ = tree_flatten((arguments, options))
        leaves, structure = tree_flatten(result)
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        left = tuple(
            Passed(next(at for at, one in enumerate(given) if one is leaf))
            if is_one_of(leaf, given)
            else self._like(leaf)
            for leaf in leaves
        )
        answer = Answer(left, structure, bool(result[1]), followed)
        for number, tensor in zip(self._note(name, name, [*own, *hidden], made, answer), made, strict=True):
            if not is_one_of(tensor, given):
                give_number(tensor, number)
        if self.sketch.known is not None and not result[1] and not hidden:
            self.sketch.known[self._kind(name, arguments, options)] = answer
        return result[0]

    def _run(
        self, name: str, forward: Callable[..., Any], arguments: Any, options: dict[str, Any]
    ) -> tuple[list[Any], tuple[Any, Effects], bool, list[Tensor]]:
        """What a block was called with, without values; what it returned and left behind; whether it could be followed; and
        tensors of other blocks that it found elsewhere than in its arguments."""
        block, as_called = self.sketch.module.get_submodule(name), as_list(arguments, options)
        kind = None if self.sketch.known is None else self._kind(name, arguments, options)
        known = self._answer(kind, arguments, options)
        if known is not None:
            return *known, True, []
        before = Snapshot(block.modules(), arguments=as_called)
        with _Hidden(len(self.events)) as hidden:
            given, result, followed = self._run_block(forward, arguments, options)
        if hidden.stray:
            raise self._stray(hidden.stray, f"block '{name}'")
        own = [number_of(leaf) for leaf in tree_leaves((arguments, options))]
        others = [leaf for number, leaf in hidden.found.items() if number not in own and not self._is_parameter(leaf)]
        return given, (result, find_effects(block, name, before, as_called)), followed, others

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
        if reading.stray:
            raise self._stray(reading.stray, "the loss")
        self._note(OBJECTIVE, OBJECTIVE, read, [], None)

    def _run_block(
        self, forward: Callable[..., Any], arguments: Any, options: dict[str, Any]
    ) -> tuple[list[Any], Any, bool]:
        """What it was called with, without values, what it returned, and whether it could be followed.

        A block that cannot be followed (it asks which expert has tokens) is taken to return its first tensor as it came: a
        stage that finds otherwise says so."""
        followed = True
        try:
            result, given = self.on_shapes(forward, arguments, options)
        except Exception:
            first = tensors_in((arguments, options))[0]
            with self.fakes:
                result = torch.empty_like(self.stand_in(first)).requires_grad_(torch.is_grad_enabled()).clone()
            given, followed = [], False
        return given, result, followed

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

    def _check_writes(self, function: Callable[..., Any], arguments: Any) -> None:
        """A parameter is its own stage's: one that code outside of its block writes would be written elsewhere, or in a copy."""
        if not arguments or not (is_in_place(function) or _name(function) == "__set__"):
            return
        for leaf in tensors_in(arguments[0]):
            name = self.written.get(_memory(leaf))
            if name is not None and self.sketch.block_of(name) != OUTSIDE:
                raise PlanError(
                    f"the model cannot be cut: outside of its blocks its forward writes parameter '{name}' ({_name(function)}), "
                    "which one stage holds: write it inside its block, or after the step, or set pp to 1"
                )

    def _is_parameter(self, leaf: Any) -> bool:
        return id(leaf) in self.sketch.names

    def _is_stray(self, leaf: Any) -> bool:
        """A tensor with a gradient that came out of a block in a way that was not seen."""
        return (
            isinstance(leaf, FakeTensor)
            and leaf.requires_grad
            and number_of(leaf) is None
            and not self._is_parameter(leaf)
        )

    def _stray(self, function: str, reader: str) -> PlanError:
        return PlanError(
            f"the model cannot be cut: {reader} reads a tensor ({function}) that another block made and neither "
            "returned nor left as an attribute, in a list or in a dict of its own: it lies in a "
            "global variable or in an object, which other stages do not have; return it, set it as an attribute of the block, or "
            "set pp to 1"
        )

    def _unknown(self, function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> PlanError:
        numbers = [number for leaf in tree_leaves((arguments, options)) if (number := number_of(leaf)) is not None]
        return PlanError(
            f"the model cannot be cut: outside its blocks it reads a value of what block '{self._maker(numbers[0])}' made "
            f"({getattr(function, '__name__', function)}, {line_now()}), and stages that do not have it could not follow; move "
            "that into a block, or set pp to 1"
        )

    def _maker(self, number: int) -> str:
        """The block whose result a tensor comes of."""
        made = [event for event in self.events if number in event.makes]
        if not made or made[0].block:
            return made[0].block if made else OUTSIDE
        return next((block for read in made[0].reads if (block := self._maker(read))), OUTSIDE)


class _Hidden(TorchFunctionMode):
    """Notes the numbered tensors that a block reads, and whether it reads one that an earlier call of a block made and did not
    hand on in a way that was seen (`stray`: the function that reads it)."""

    def __init__(self, place: int) -> None:
        """place: of this call among the events."""
        super().__init__()
        self.place = place
        self.found: dict[int, Tensor] = {}
        self.stray = ""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        for leaf in tree_leaves((arguments, options or {})):
            number = number_of(leaf)
            if number is not None:
                self.found[number] = leaf
            elif isinstance(leaf, Tensor) and vars(leaf).get(MADE_AT, self.place) != self.place:
                self.stray = self.stray or _name(function)
        result = function(*arguments, **(options or {}))
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                setattr(tensor, MADE_AT, self.place)
        return result


class _Reading(Follower):
    """Notes the numbered tensors that functions read; their results have no numbers. `stray`: a function that reads a tensor which
    a block made and did not hand on."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__(fakes)
        self.found: dict[int, Tensor] = {}
        self.stray = ""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        arguments, options = arguments, options or {}
        for leaf in tree_leaves((arguments, options)):
            number = number_of(leaf)
            if number is not None:
                self.found[number] = leaf
            elif isinstance(leaf, Tensor) and MADE_AT in vars(leaf):
                self.stray = self.stray or _name(function)
        result, _ = self.on_shapes(function, arguments, options)
        return result


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _memory(tensor: Tensor) -> int:
    """The same for tensors that share it: a parameter and its `.data`."""
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> Affine:
    return Affine(float(tensor.numel() * tensor.element_size()), 0.0)
