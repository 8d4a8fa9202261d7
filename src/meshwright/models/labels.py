"""Who answers a batch's labels: the loss outside of the model, or the model itself.

    labels                        inputs        who
    already shifted               tokens        the default loss: cross-entropy where the model answers
    equal to the inputs           tokens        the model, if its forward takes `labels`: as Hugging Face's causal models, it shifts
                                                them inside and returns its loss; else nobody, and they are refused
    of an encoder-decoder         no decoder's  the model, which makes the decoder's inputs of them
    none                          anything      the model, if it returns a loss

Labels that the model takes stand in the batch under another name (`who_answers`): `call` passes them on as `labels`, and the count
of label tokens knows whether the first of each sample is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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


def own_loss(output: Any, batch: Batch) -> Tensor | None:
    """The loss that a model returned: alone, by its name, or, where it was given targets, as the one number among tensors."""
    if isinstance(output, Tensor):
        return output if _is_number(output) else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if _is_number(named):
        return named
    if not isinstance(output, tuple | list) or _targets(batch) is None:
        return None  # a number beside logits may be an auxiliary loss alone
    numbers = [one for one in output if _is_number(one)]
    return numbers[0] if len(numbers) == 1 else None


def _is_number(value: Any) -> TypeGuard[Tensor]:
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
    if labels is None or labels.is_meta or labels.is_floating_point():
        return LABELS
    inputs = _equal_inputs(batch, labels)
    takes = isinstance(batch, Mapping) and _takes_labels(module)
    if inputs is None:
        return TAKEN if takes and _lacks_decoder_inputs(module, batch) else LABELS
    if takes:
        return SHIFTED
    raise unshifted(inputs)


def unshifted(inputs: str) -> ModelError:
    return ModelError(
        f"the labels are equal to {inputs}, and nothing shifts them: the model would learn to copy. A language model's labels are "
        "the tokens that follow: give tokens[:, :-1] as inputs and tokens[:, 1:] as labels; or a model whose forward takes "
        "`labels`, shifts them and returns its loss; or, if copies are what it is to learn, a loss of your own (loss=...)"
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
    """A model that takes labels equal to its inputs must shift them itself: then the first of a sample answers nothing, and another
    in its place does not change the loss. is_asked: whether any rank asks, since all compute the loss together."""
    other = _with_other_first_labels(batch)
    if not is_asked(other is not None):
        return
    one, changed = loss(batch), loss(batch if other is None else other)
    if abs(one - changed) > tolerance * max(abs(one), abs(changed)):
        raise unshifted("the inputs")


def _with_other_first_labels(batch: Batch) -> Batch | None:
    """None where the batch has no labels for the model, or others than its inputs."""
    name = next((name for name in (SHIFTED, *TARGETS) if isinstance(batch, Mapping) and name in batch), None)
    if name is None or not isinstance(batch, Mapping):
        return None
    labels, others = batch[name], {key: tensor for key, tensor in batch.items() if key != name}
    if labels.is_meta or labels.is_floating_point() or labels.dim() < 2 or _equal_inputs(others, labels) is None:
        return None
    counted = labels[labels >= 0]
    first, low, high = labels[:, :1], counted.min(), counted.max()
    other = torch.where(first < 0, first, torch.where(first == low, high, low))
    return {**batch, name: torch.cat([other, labels[:, 1:]], dim=1)}


def name_labels(batch: Batch, name: str) -> Batch:
    """The same batch, with its labels under a name that `who_answers` gave."""
    if name == LABELS or not isinstance(batch, Mapping):
        return batch
    return {name if key == LABELS else key: tensor for key, tensor in batch.items()}


def _takes_labels(module: nn.Module) -> bool:
    return LABELS in inspect.signature(type(module).forward).parameters  # its instance's may be wrapped


def _lacks_decoder_inputs(module: nn.Module, batch: Batch) -> bool:
    config = getattr(module, "config", None)
    return getattr(config, "is_encoder_decoder", False) is True and not any(
        "decoder_input" in str(name) for name in batch
    )


def _equal_inputs(batch: Batch, labels: Tensor) -> str | None:
    """The name of inputs that are the labels, place by place, and are not so when shifted by one."""
    if isinstance(batch, Mapping):
        named = [(f"'{name}'", tensor) for name, tensor in batch.items() if not any(w in name for w in NOT_INPUTS)]
    else:
        named = [("the inputs", tensor) for tensor in batch[:-1]]
    counted = labels != IGNORED_LABEL
    for name, tensor in named:
        if not isinstance(tensor, Tensor) or tensor.shape != labels.shape or tensor.dim() < 2:
            continue
        if tensor.is_floating_point() or not bool(counted.any()) or not torch.equal(tensor[counted], labels[counted]):
            continue
        following, counts = labels[:, :-1], counted[:, :-1]
        if not torch.equal(tensor[:, 1:][counts], following[counts]):
            return name
    return None
