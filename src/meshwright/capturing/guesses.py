"""Answers to reads of values that fake tensors do not have.

    .item() of a float         1.0
    .item() of an integer      what routing expects there, else 1
    .item() of a truth value   True where it came from `all` or from routing, else False
    equal, allclose            True
    positions that are true    as many as routing expects; all of them for any other mask, and then it is known which
    distinct values            as many as there are values
    repeats given as a tensor  one each
    lengths of CTC's targets   as long as there is room for

What depends on the batch's whole numbers alone is no guess: it is computed (capturing/known.py). Each other answer is remembered
with the question, the module and the line that asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.capturing.known import Known
from meshwright.capturing.opkinds import GROUPED, base_name, grouped_product
from meshwright.capturing.place import Place
from meshwright.capturing.recording import Recording
from meshwright.capturing.routing import ALL, Routing
from meshwright.capturing.storages import Storages
from meshwright.core.graph import EVEN_SPREAD, Guess
from meshwright.models.follow import tensors_in
from meshwright.models.location import line_now
from meshwright.runtime._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    tree_flatten,
    tree_unflatten,
    unset_fake_temporarily,
)

Answer = Callable[["Guesser", Any, tuple[Any, ...], dict[str, Any]], Any]


class Guesser:
    """Runs ops; answers those that ask for a value."""

    def __init__(self, recording: Recording, place: Place, storages: Storages, num_samples: int) -> None:
        self.recording = recording
        self.place = place
        self.storages = storages
        self.routing = Routing(storages, num_samples)
        self.known = Known(storages)
        self.positions: Tensor | None = None
        """Of all elements of a mask: the last answer that has values."""

    def run(self, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if base_name(op) == GROUPED:
            return grouped_product(*arguments, **options)
        try:
            return op(*arguments, **options)
        except (DataDependentOutputException, DynamicOutputShapeException):
            answer = _ANSWERS.get(base_name(op))
            if answer is None:
                raise
            if all(map(self.known.has, tensors_in((arguments, options)))):
                return self._computed(op, arguments, options)
            return answer(self, op, arguments, options)

    def follow(self, op: Any, arguments: tuple[Any, ...], options: dict[str, Any], outputs: list[Tensor]) -> None:
        """Learn from an op that has run; the storages have noticed its results."""
        self.routing.follow(base_name(op), arguments, outputs)
        self.known.follow(op, arguments, options, outputs)
        if self.positions is not None and outputs and outputs[0] is self.positions:
            self.known.are_all_positions(outputs[0], tuple(arguments[0].shape))
        self.positions = None

    def _computed(self, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A plain value, or tensors of the sizes that the values lead to."""
        leaves, structure = tree_flatten((arguments, options))
        values = [self.known.value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given, named = tree_unflatten(values, structure)
        with unset_fake_temporarily():
            result = op(*given, **named)
        made, nest = tree_flatten(result)
        return tree_unflatten([torch.empty_like(one) if isinstance(one, Tensor) else one for one in made], nest)

    def note(self, question: str, answer: str) -> None:
        """Backward asks again what forward asked."""
        if self.place.phase == "backward":
            return
        guess = Guess(module=self.place.last.path, line=line_now(), question=question, answer=answer)
        self.recording.guesses[guess] = None

    def num_true(self, mask: Tensor) -> int:
        if self.known.has(mask):
            return self.known.num_true(mask)
        share = self.routing.density(mask)
        words = "all" if share == ALL else f"{share.numerator} in {share.denominator}, {EVEN_SPREAD}"
        self.note("how many elements of a mask are true", words)
        return self.routing.num_true(mask)


def _item(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    tensor: Tensor = arguments[0]
    answer: bool | int | float = 1.0
    why = ""
    if tensor.dtype is torch.bool:
        writer = guesser.storages.writer(tensor)
        from_all = isinstance(writer, int) and guesser.recording.ops[writer].name == "all"
        answer = from_all or guesser.routing.is_routing(tensor)
    elif not tensor.is_floating_point():
        answer = guesser.routing.count(tensor)
        why = f", {EVEN_SPREAD}" if guesser.routing.is_count(tensor) else ""
    guesser.note(f"the value of a {str(tensor.dtype).removeprefix('torch.')} tensor", f"{answer}{why}")
    return answer


def _equal(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    guesser.note("whether two tensors are equal", "True")
    return True


def _nonzero(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    mask: Tensor = arguments[0]
    found = torch.empty(guesser.num_true(mask), mask.dim(), dtype=torch.int64, device=mask.device)
    guesser.positions = found if found.shape[0] == mask.numel() else None
    return found


def _masked_select(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    tensor, mask = arguments
    return torch.empty(guesser.num_true(mask), dtype=tensor.dtype, device=tensor.device)


def _index(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Masks become the positions of their truths."""
    positions: list[Tensor | None] = []
    for index in arguments[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions.extend(_nonzero(guesser, op, (index,), {}).unbind(1))
        else:
            positions.append(index)
    return op(arguments[0], positions)


def _unique(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """(values, where each element went, how often each value occurs), every element its own value."""
    tensor: Tensor = arguments[0]
    guesser.note("how many values are distinct", "all")
    flat = tensor.flatten() if base_name(op) != "unique_dim" else tensor
    places = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device)
    return torch.empty_like(flat), places, torch.empty(flat.shape[0], dtype=torch.int64, device=tensor.device)


def _repeat(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    guesser.note("how often elements are repeated", "once each")
    return torch.empty_like(arguments[0])


def _bincount(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    least = options.get("minlength", arguments[2] if len(arguments) > 2 else 0)
    bins = max(1, least)
    guesser.note("the largest value that is counted", str(bins - 1))
    return torch.empty(bins, dtype=torch.int64, device=arguments[0].device)


def _ctc_loss(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(loss of each sample, what backward reads of each sample, time and place in its target with blanks around)"""
    log_probs, targets = arguments[:2]
    time, samples = log_probs.shape[:2] if log_probs.dim() == 3 else (log_probs.shape[0], 1)
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // samples)
    guesser.note("how long the targets of a CTC loss are", str(longest))
    return log_probs.new_empty(samples), log_probs.new_empty(samples, time, 2 * longest + 1)


def _ctc_loss_backward(guesser: Guesser, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    return torch.empty_like(arguments[1])


_ANSWERS: dict[str, Answer] = {
    "_local_scalar_dense": _item,
    "equal": _equal,
    "allclose": _equal,
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "index": _index,
    "_unique2": _unique,
    "unique_dim": _unique,
    "unique_consecutive": _unique,
    "repeat_interleave": _repeat,
    "bincount": _bincount,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
}
