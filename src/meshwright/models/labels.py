"""Who answers a batch's labels: the loss outside of the model, or the model itself.

    labels                        forward takes `labels`                    it does not
    integers, not the inputs      the model, which answers them in place    the default loss: cross-entropy where the model answers
                                  (Hugging Face's: the default loss,
                                  since its causal models shift them)
    equal to the inputs           the model, which shifts them inside       nobody: they are refused
    real numbers                  the model                                 the default loss: mean square error
    of an encoder-decoder         the model, which makes the decoder's      the default loss
    without decoder inputs        inputs of them
    none                          the model, if it returns a loss           the model, if it returns a loss

A model that takes labels and returns no loss leaves it to the default one. Whether a model shifts its labels is tried, not believed
(`check_shift`). Labels that the model takes stand in the batch under another name (`who_answers`): `call` passes them on as
`labels`, and the count of label tokens knows whether the first of each sample is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from meshwright.core.errors import ModelError

IGNORED_LABEL = -100
"""Positions with this label do not count, as in torch and Hugging Face."""
LABELS = "labels"
TAKEN = "labels taken by the model"
SHIFTED = "labels shifted by the model"
"""The first label of a sample answers nothing."""
TARGETS = ("targets", "target", "label", "tgt", "y")
"""Names that others give to what a model of theirs computes its loss from."""
NOT_INPUTS = ("mask", "type", "position", "label")
"""Words in the names of entries that are no tokens."""

SHIFT_TOLERANCE = 1e-5
"""Relative difference of two losses that are computed alike but for labels that do not count, in any precision."""
UNCHANGED = 1e-7
"""Relative difference below which a loss did not change at all."""
LIBRARY = "transformers."
"""Models of this library have conventions of their own for `labels`."""

Batch = Tensor | Mapping[str, Tensor] | Sequence[Tensor]


def labels_of(batch: Batch) -> Tensor | None:
    """What the loss outside of the model compares with: `labels` of a dict, the last of several tensors, or nothing."""
    if isinstance(batch, Tensor):
        return None
    if isinstance(batch, Mapping):
        return batch.get(LABELS)
    return batch[-1] if len(batch) > 1 else None


def arguments_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a model is called with."""
    given = {name: tensor for name, tensor in batch.items() if name not in (LABELS, TAKEN, SHIFTED)}
    taken = batch.get(TAKEN, batch.get(SHIFTED))
    return given if taken is None else {**given, LABELS: taken}


def taken_labels(batch: Batch) -> Tensor | None:
    """Labels that the model was given to answer in place."""
    return batch.get(TAKEN) if isinstance(batch, Mapping) else None


def own_loss(output: Any, batch: Batch) -> Tensor | None:
    """The loss that a model returned: alone, by its name, or, where it was given targets, as the one number among tensors."""
    if isinstance(output, Tensor):
        return output if is_number(output) else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if is_number(named):
        return named
    if not isinstance(output, tuple | list) or _targets(batch) is None:
        return None  # a number beside logits may be an auxiliary loss alone
    numbers = [one for one in output if is_number(one)]
    return numbers[0] if len(numbers) == 1 else None


def is_number(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def num_targets(batch: Batch) -> int | None:
    """How many things the mean of a model's own loss runs over; None where no entry says."""
    targets = _targets(batch)
    if targets is None or targets.is_floating_point():
        return None
    assert isinstance(batch, Mapping)
    return int(((targets[..., 1:] if SHIFTED in batch else targets) >= 0).sum())


def _targets(batch: Batch) -> Tensor | None:
    """What a model computes its own loss from. Every convention marks what does not count by a negative number."""
    if not isinstance(batch, Mapping):
        return None
    return next((batch[name] for name in (SHIFTED, TAKEN, *TARGETS) if name in batch), None)


def who_answers(module: nn.Module, batch: Batch) -> str:
    """The name a batch's labels are to have: theirs, or one that hands them to the model. Labels that nobody shifts are refused."""
    labels = labels_of(batch)
    if labels is None:
        return LABELS
    takes = isinstance(batch, Mapping) and _takes_labels(module)
    if labels.is_floating_point():
        return TAKEN if takes else LABELS
    inputs = None if labels.is_meta else _equal_inputs(batch, labels)
    if inputs is None:
        return TAKEN if takes and _answers_in_place(module, batch) else LABELS
    if takes:
        return SHIFTED
    raise unshifted(inputs)


def unshifted(inputs: str) -> ModelError:
    return ModelError(
        f"the labels are equal to {inputs}, and nothing shifts them: the model would learn to copy. A language model's labels are "
        "the tokens that follow: give tokens[:, :-1] as inputs and tokens[:, 1:] as labels; or a model whose forward takes "
        "`labels`, shifts them and returns its loss; or, if copies are what it is to learn, a loss of your own (loss=...)"
    )


def shifted_twice() -> ModelError:
    return ModelError(
        "the model shifts the labels that it is given, and they are already the tokens that follow the inputs: it would learn to "
        "predict two tokens ahead. Give labels equal to the inputs, or a loss of your own (loss=...)"
    )


def has_targets(batch: Batch) -> bool:
    """Whether the model is given what it may compute a loss from."""
    return _targets(batch) is not None


def check_shift(
    loss: Callable[[Batch], float],
    batch: Batch,
    is_asked: Callable[[bool], bool] = bool,
    tolerance: float = SHIFT_TOLERANCE,
) -> None:
    """Labels are shifted once. A model that shifts them does not look at the first of a sample, and another in its place does not
    change the loss: that must be so where labels equal the inputs, and must not where they follow them.
    is_asked: whether any rank asks, since all compute the loss together."""
    copied = _labels_that(batch, (SHIFTED, *TARGETS), _are_inputs)
    if _change(loss, batch, copied, is_asked, unasked=0.0) > tolerance:
        raise unshifted("the inputs")
    following = _labels_that(batch, (TAKEN, *TARGETS), _follow_inputs)
    if _change(loss, batch, following, is_asked, unasked=1.0) < UNCHANGED:
        raise shifted_twice()


def _change(
    loss: Callable[[Batch], float], batch: Batch, name: str | None, is_asked: Callable[[bool], bool], unasked: float
) -> float:
    """How much of the loss other first labels change, of all ranks' samples together."""
    if not is_asked(name is not None):
        return unasked
    one, changed = loss(batch), loss(batch if name is None else _with_other_first_labels(batch, name))
    return abs(one - changed) / max(abs(one), abs(changed), torch.finfo().tiny)


def _labels_that(batch: Batch, names: Sequence[str], hold: Callable[[Batch, Tensor], bool]) -> str | None:
    """The name of the labels that a model was given, where they stand to its inputs as asked."""
    name = next((name for name in names if isinstance(batch, Mapping) and name in batch), None)
    if name is None or not isinstance(batch, Mapping):
        return None
    labels, others = batch[name], {key: tensor for key, tensor in batch.items() if key != name}
    if labels.is_meta or labels.is_floating_point() or labels.dim() < 2 or len(labels[labels >= 0].unique()) < 2:
        return None
    return name if hold(others, labels) else None


def _are_inputs(batch: Batch, labels: Tensor) -> bool:
    return _equal_inputs(batch, labels) is not None


def _with_other_first_labels(batch: Batch, name: str) -> Batch:
    assert isinstance(batch, Mapping)
    labels = batch[name]
    counted = labels[labels >= 0]
    first, low, high = labels[:, :1], counted.min(), counted.max()
    other = torch.where(first < 0, first, torch.where(first == low, high, low))
    return {**batch, name: torch.cat([other, labels[:, 1:]], dim=1)}


def name_labels(batch: Batch, name: str) -> Batch:
    """The same batch, with its labels under a name that `who_answers` gave."""
    if name == LABELS or not isinstance(batch, Mapping):
        return batch
    return {name if key == LABELS else key: tensor for key, tensor in batch.items()}


def handed_to_both(module: nn.Module, batch: Batch) -> Batch:
    """The same batch for a loss of the user's, which reads its labels; a model that cannot be called without them gets them too."""
    if isinstance(batch, Mapping) and LABELS in batch and TAKEN not in batch and _needs_labels(module):
        return {**batch, TAKEN: batch[LABELS]}
    return batch


def _takes_labels(module: nn.Module) -> bool:
    return LABELS in inspect.signature(type(module).forward).parameters  # its instance's may be wrapped


def _answers_in_place(module: nn.Module, batch: Batch) -> bool:
    """Whether a model that takes labels computes its loss from them as they are."""
    return _lacks_decoder_inputs(module, batch) or not any(map(_is_of_library, module.modules()))


def _is_of_library(module: nn.Module) -> bool:
    return any(base.__module__.startswith(LIBRARY) for base in type(module).__mro__) and _takes_labels(module)


def _needs_labels(module: nn.Module) -> bool:
    """Whether its forward cannot be called without them."""
    asked = inspect.signature(type(module).forward).parameters.get(LABELS)
    return asked is not None and asked.default is inspect.Parameter.empty


def _lacks_decoder_inputs(module: nn.Module, batch: Batch) -> bool:
    config = getattr(module, "config", None)
    return getattr(config, "is_encoder_decoder", False) is True and not any(
        "decoder_input" in str(name) for name in batch
    )


def _token_inputs(batch: Batch, labels: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The entries of a batch that may be the tokens its labels belong to, with their names."""
    if isinstance(batch, Mapping):
        named = [(f"'{name}'", tensor) for name, tensor in batch.items() if not any(w in name for w in NOT_INPUTS)]
    else:
        named = [("the inputs", tensor) for tensor in batch[:-1]]
    for name, tensor in named:
        if not isinstance(tensor, Tensor) or tensor.is_floating_point():
            continue
        if tensor.shape == labels.shape and tensor.dim() >= 2:
            yield name, tensor


def _follow_inputs(batch: Batch, labels: Tensor) -> bool:
    """Whether labels are the inputs' next tokens, where they count and are known."""
    counted = labels[:, :-1] >= 0
    return bool(counted.any()) and any(
        torch.equal(tensor[:, 1:][counted], labels[:, :-1][counted]) for _, tensor in _token_inputs(batch, labels)
    )


def _equal_inputs(batch: Batch, labels: Tensor) -> str | None:
    """The name of inputs that are the labels, place by place, and are not so when shifted by one."""
    counted = labels != IGNORED_LABEL
    for name, tensor in _token_inputs(batch, labels):
        if not bool(counted.any()) or not torch.equal(tensor[counted], labels[counted]):
            continue
        following, counts = labels[:, :-1], counted[:, :-1]
        if not torch.equal(tensor[:, 1:][counts], following[counts]):
            return name
    return None
