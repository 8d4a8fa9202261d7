"""Running one stage of a forward: the user's own code, with the events of other stages answered instead of done.

    event of this stage       runs
    event of another stage    what crossed to this stage is put in its place; all else is *absent*: a fake tensor with
                              shape, dtype and device, which code may ask for its size but not for its values

When the last event of the stage is done the forward is left: at the next event, so that whatever surrounds the last block
(hooks that shard it) ends as it should.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import ModelError
from meshwright.core.flow import OBJECTIVE
from meshwright.models.effects import ARGUMENT, apply_effects, as_list, find_effects, read_effects
from meshwright.models.follow import (
    Follower,
    give_number,
    is_absent,
    number_of,
    results_of,
)
from meshwright.models.snapshot import Snapshot
from meshwright.models.steps import Passed
from meshwright.runtime._torch import FakeTensorMode, tree_flatten, tree_leaves, tree_unflatten
from meshwright.runtime.pipeline.wiring import Event, Wiring


class LeftEarly(BaseException):
    """Nothing is left to do for this stage. No Exception: user code must not catch it."""


class StageRun(Follower):
    """One stage and microbatch. `sent`: what it made of what crosses to the next stage, by number."""

    def __init__(self, wiring: Wiring, stage: int, arrived: dict[int, Tensor], fakes: FakeTensorMode) -> None:
        super().__init__(fakes)
        self.wiring = wiring
        self.stage = stage
        self.arrived = {version: tensor for number, tensor in arrived.items() for version in wiring.versions(number)}
        self.wanted = frozenset(wiring.sent(stage))
        self.sent = {number: tensor for number, tensor in arrived.items() if number in self.wanted}
        self.place = 0
        self.last = wiring.last_events[stage]

    def outside(self, function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
        self._leave_when_done()
        here = self._event.stage == self.stage
        if here and not any(map(is_absent, tree_leaves((arguments, options)))):
            result = function(*arguments, **options)
            made = results_of(function, arguments, result)
            if made:
                self._made(self._next(getattr(function, "__name__", str(function))), made)
            return result
        with torch.no_grad():
            result, stood_in = self.on_shapes(function, arguments, options)
        if not results_of(function, arguments, result):
            return result
        event = self._next(getattr(function, "__name__", str(function)))
        if here:
            raise self._missing(event)
        leaves, structure = tree_flatten(result)
        own = zip(stood_in, tree_leaves((arguments, options)), strict=True)
        replaced = {id(one): given for one, given in own if isinstance(one, Tensor)}
        returned = [replaced.get(id(leaf), leaf) for leaf in leaves]  # some functions return what they were given
        return tree_unflatten(self._answered(event, returned), structure)

    def block(
        self, name: str, module: nn.Module, forward: Callable[..., Any], arguments: Any, options: dict[str, Any]
    ) -> Any:
        self._leave_when_done()
        event = self._next(name)
        own = tree_leaves((arguments, options))
        assert event.answer is not None
        answer, as_called = event.answer, as_list(arguments, options)
        if event.stage != self.stage:
            leaves = [own[leaf.position] if isinstance(leaf, Passed) else leaf for leaf in answer.leaves]
            result, effects = tree_unflatten(self._answered(event, leaves), answer.structure)
            apply_effects(module, effects, as_called)
            return result
        if any(map(is_absent, own)):
            raise self._missing(event)
        before = None if answer.was_followed else Snapshot(module.modules(), arguments=as_called)
        with self.not_following():
            result = forward(*arguments, **options)
        if before is not None:
            _check_leaves_nothing(module, name, before, as_called)
        like = tree_unflatten(list(answer.leaves), answer.structure)[1] if answer.has_effects else {}
        made = (result, read_effects(module, like, as_called))
        self._made(event, [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)])
        return result

    @property
    def _event(self) -> Event:
        return self.wiring.events[self.place]

    def _leave_when_done(self) -> None:
        if self.place > self.last:
            raise LeftEarly

    def end(self) -> None:
        """The forward has returned: nothing of this stage may be left but the loss."""
        left = self.wiring.events[self.place : self.last + 1]
        if any(event.name != OBJECTIVE for event in left):
            raise ModelError(
                f"the forward ends where it called '{left[0].name}' when it was cut into stages: it goes another way with this "
                "batch, or on a stage that holds other parameters, and the stages would not agree; let it take one way for all "
                "batches of a shape"
            )

    def _next(self, name: str) -> Event:
        event = self._event
        if event.name != name:
            raise ModelError(
                f"the forward calls '{name}' where it called '{event.name}' when it was cut into stages: it goes another way with "
                "this batch, and the stages would not agree; let it take one way for all batches of a shape (a layer that is "
                "dropped at random: set its probability to 0), or set pp to 1"
            )
        self.place += 1
        return event

    def _made(self, event: Event, tensors: list[Tensor]) -> None:
        if len(tensors) != len(event.makes):
            raise ModelError(
                f"'{event.name}' made {len(tensors)} tensors, and {len(event.makes)} when the model was cut into stages: "
                "let it return the same for all batches of a shape"
            )
        for number, tensor in zip(event.makes, tensors, strict=True):
            if number_of(tensor) is None:
                give_number(tensor, number)
            if number in self.wanted:
                self.sent[number] = tensor

    def _answered(self, event: Event, leaves: list[Any]) -> list[Any]:
        """Tensors that crossed to this stage in the place of absent ones."""
        numbers = iter(event.makes)
        return [self._answer(next(numbers), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _answer(self, number: int, leaf: Tensor) -> Tensor:
        if number in self.arrived:
            return give_number(self.arrived[number], number)
        return leaf if number_of(leaf) is not None else give_number(leaf, number)

    def _missing(self, event: Event) -> ModelError:
        return ModelError(
            f"'{event.name}' on stage {self.stage} needs a tensor of an earlier stage that did not cross to it: it was changed in "
            "place after it was made, or hidden in an object; hand it on as a tensor of its own"
        )


def _check_leaves_nothing(module: nn.Module, name: str, before: Snapshot, arguments: list[Any]) -> None:
    for _, path, attribute in find_effects(module, name, before, arguments):
        where = "an argument" if path == ARGUMENT else f"'{'.'.join(filter(None, (name, path, attribute)))}'"
        raise ModelError(
            f"block '{name}' leaves tensors behind in {where}, and it cannot be followed on shapes alone (it looks at "
            "values), so that stages do not know of them; return them, or set pp to 1"
        )
