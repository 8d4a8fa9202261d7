"""Blocks that are not followed because another of their group was.

Of each group the first two blocks and the last one are followed. The second is the *representative*: the block before it
is followed too, so what it reads and frees of its neighbours is seen. The others return fresh tensors like those the
representative returned and hand back gradients like their inputs. They keep for backward what the representative kept of
its inputs and outputs, so all that lives outside them lives as long as it would. What the representative leaves behind
otherwise (a count that its module notes) may lie there, as long as nobody reads it and it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from meshwright.capturing.conduct import Conduct, Fresh, Handed, Observer, describe_call
from meshwright.capturing.groups import CannotSkip, Group
from meshwright.capturing.place import Place
from meshwright.capturing.recording import Recording, SkipEntry
from meshwright.capturing.storages import Storages
from meshwright.runtime._torch import _top_saved_tensors_default_hooks, tree_flatten, tree_unflatten

Forward = Callable[..., Any]


class Skipper:
    """Stands in front of the forward of representatives and of blocks to be skipped."""

    def __init__(self, recording: Recording, place: Place, storages: Storages) -> None:
        self.recording = recording
        self.place = place
        self.storages = storages
        self.conducts: dict[str, Conduct] = {}

    @contextmanager
    def guarding(self, module: nn.Module, groups: Sequence[Group]) -> Iterator[None]:
        guarded = []
        for group in groups:
            for name in (group.representative, *group.skipped):
                part = module.get_submodule(name)
                guarded.append((part, vars(part).get("forward")))
                part.forward = self._guard(name, part.forward, group)
        try:
            yield
        finally:
            for part, own in guarded:
                del part.forward
                if own is not None:
                    part.forward = own

    def _guard(self, name: str, forward: Forward, group: Group) -> Forward:
        def represent(*arguments: Any, **options: Any) -> Any:
            return self._represent(group, lambda: forward(*arguments, **options), (arguments, options))

        def skip(*arguments: Any, **options: Any) -> Any:
            return self._skip(name, group, (arguments, options))

        return represent if name == group.representative else skip

    def _represent(self, group: Group, forward: Callable[[], Any], inputs: Any) -> Any:
        """Follow the block and learn how others like it can be skipped."""
        name = group.representative
        leaves, structure = tree_flatten(inputs)
        call = describe_call(name, leaves, structure)
        if name in self.conducts or not call.plain or not self._plain_step():
            raise CannotSkip(group)
        observer = Observer(self.storages)
        result = observer.follow(forward)
        conduct = observer.conduct(name, call, leaves, result)
        if conduct is None:
            raise CannotSkip(group)
        self.conducts[name] = conduct
        self.storages.left_behind.update(dict.fromkeys(conduct.left_behind, group))
        return result

    def _plain_step(self) -> bool:
        """Recompute calls blocks again in backward, and packs what they save: such blocks are followed."""
        return self.place.phase == "forward" and not _top_saved_tensors_default_hooks(True)

    def _skip(self, name: str, group: Group, inputs: Any) -> Any:
        conduct = self.conducts.get(group.representative)
        leaves, structure = tree_flatten(inputs)
        again = name in self.recording.representatives
        if again or conduct is None or conduct.call != describe_call(name, leaves, structure) or not self._plain_step():
            raise CannotSkip(group)
        self.recording.representatives[name] = conduct.block
        self.recording.log.append(SkipEntry("forward", name))
        self._guess_again(name, conduct.block)
        return self._stand_in(name, conduct, leaves)

    def _guess_again(self, name: str, followed: str) -> None:
        """What was guessed about the representative would be guessed about the skipped block."""
        stem = f"{followed}."
        again = [guess for guess in self.recording.guesses if f"{guess.module}.".startswith(stem)]
        for guess in again:
            module = f"{name}.{guess.module.removeprefix(followed).removeprefix('.')}".rstrip(".")
            self.recording.guesses[msgspec.structs.replace(guess, module=module)] = None

    def _stand_in(self, name: str, conduct: Conduct, leaves: list[Any]) -> Any:
        inputs = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
        trained = any(fresh.requires_grad for fresh in conduct.fresh)
        with torch.set_grad_enabled(trained):
            anchor = torch.empty(0, requires_grad=trained)  # its parameters need gradients even if no input does
            skip: Forward = _Skipped.apply
            made = iter(skip(conduct, lambda: self._skip_backward(name), anchor, *inputs))
        return tree_unflatten([_result(result, made, leaves) for result in conduct.results], conduct.structure)

    def _skip_backward(self, name: str) -> None:
        self.place.find()  # what dies from here on dies inside the skipped block
        entry = SkipEntry("backward", name)
        self.recording.log.append(entry)
        self.recording.gradient_order.append(entry)


def _result(result: Any, made: Iterator[Tensor], leaves: list[Any]) -> Any:
    if isinstance(result, Fresh):
        return next(made)
    return leaves[result.position] if isinstance(result, Handed) else result


class _Skipped(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, conduct: Conduct, at_backward: Callable[[], None], anchor: Tensor, *inputs: Any) -> Any:
        outputs = tuple(fresh.make() for fresh in conduct.fresh)
        kept = [output for output, fresh in zip(outputs, conduct.fresh, strict=True) if fresh.kept]
        context.save_for_backward(*(inputs[at] for at in sorted(conduct.kept_inputs)), *kept)
        context.mark_non_differentiable(
            *(output for output, fresh in zip(outputs, conduct.fresh, strict=True) if not fresh.requires_grad)
        )
        context.set_materialize_grads(False)
        context.at_backward = at_backward
        context.shapes = [(tuple(tensor.shape), tensor.dtype) if tensor is not None else None for tensor in inputs]
        context.added_to = conduct.added_to
        return outputs

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        context.at_backward()
        found: list[Tensor | None] = []
        for position, (need, shape) in enumerate(zip(context.needs_input_grad[3:], context.shapes, strict=True)):
            if need and position in context.added_to:
                found.append(gradients[context.added_to[position]])
            else:
                found.append(torch.empty(shape[0], dtype=shape[1]) if need else None)
        return None, None, None, *found
