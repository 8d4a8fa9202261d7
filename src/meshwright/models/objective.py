"""How a batch goes into a model and what its loss is.

A batch is a tensor, a pair `(inputs, labels)`, or a dict: every entry is passed to the model by name, `labels` only where its
forward takes them (models/labels.py says when). The first dim of every tensor counts samples. Labels that the default loss
compares with stand where the model answers them: for a language model they are already shifted by one. A loss that nobody gives,
neither the user nor the model, is refused.

A loss is an ordinary mean. `count` says over how many things the mean runs (label tokens, or samples), so that microbatches
and ranks that hold different numbers of them are weighted exactly:

    loss of the global batch = Σ mean_i · count_i / Σ count_i
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.errors import ModelError
from meshwright.models.head_loss import PostponedLogits, cross_entropy_in_pieces
from meshwright.models.labels import IGNORED_LABEL as IGNORED_LABEL
from meshwright.models.labels import Batch as Batch
from meshwright.models.labels import (
    arguments_of,
    handed_to_both,
    is_number,
    labels_of,
    name_labels,
    num_targets,
    own_loss,
    taken_labels,
    who_answers,
)
from meshwright.models.one_process import as_one_process
from meshwright.models.own_recompute import own_recompute_left_out


@dataclass(frozen=True)
class Objective:
    loss: Callable[[Any, Batch], Tensor]
    """(what the model returned, batch) → mean loss."""
    count: Callable[[Batch], int]
    """How many things that mean runs over."""
    is_given: bool = True
    """Whether the loss is the user's, and not the default one."""


def call(module: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch. What is recomputed is not for the model to decide (models/own_recompute.py)."""
    with own_recompute_left_out(), as_one_process():
        if isinstance(batch, Tensor):
            return module(batch)
        if isinstance(batch, Mapping):
            return module(**arguments_of(batch))
        return module(*(batch[:-1] if len(batch) > 1 else batch))


def logits_of(output: Any) -> Tensor:
    """The tensor a model returned, alone or inside a Hugging Face output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    if isinstance(output, Sequence) and output and isinstance(output[0], Tensor):
        return output[0]
    raise TypeError(
        f"the model returned {type(output).__name__}: give a loss that takes it, or return a tensor of logits"
    )


def default_loss(output: Any, batch: Batch) -> Tensor:
    """Cross-entropy for integer labels, mean square error for others; without labels, the loss that the model returned."""
    labels = labels_of(batch)
    if labels is None:
        found = own_loss(output, batch)
        labels = taken_labels(batch)
        if found is not None:
            return found
        if labels is None:
            raise _no_loss(output)
    _check_no_term_is_lost(output)
    logits = logits_of(output)
    if labels.is_floating_point():
        _check_shapes(logits, labels, logits.shape, logits.shape == labels.shape)
        return F.mse_loss(logits, labels)
    answers = logits.shape[:-1]
    fits = labels.shape == answers or (len(answers) == 1 and labels.numel() == answers.numel())
    _check_shapes(logits, labels, answers, fits)
    return cross_entropy(logits, labels)


def _no_loss(output: Any) -> ModelError:
    shown = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    return ModelError(
        f"nobody gave a loss: the batch has no 'labels', and what the model returned ({shown}) holds no single number that "
        "could be one: give the loss (loss=... in Python; a file returns (module, batch, loss)), name the labels 'labels', or "
        "let the model return its loss as `.loss`, in a tuple beside its logits, or alone"
    )


def _check_no_term_is_lost(output: Any) -> None:
    """A number beside the logits that was computed from weights is a term of the loss, and the default loss would leave it out."""
    items = (
        output.items() if isinstance(output, Mapping) else enumerate(output) if isinstance(output, tuple | list) else ()
    )
    for name, value in items:
        if is_number(value) and value.requires_grad:
            raise ModelError(
                f"the model returned a number beside its logits ({name!r}) that depends on its weights, as an auxiliary loss does, "
                "and the default loss would leave it out: give the loss (loss=... in Python; a file returns (module, batch, "
                "loss)), let the model take `labels` and return its whole loss, or return that number detached"
            )


def _check_shapes(logits: Tensor, labels: Tensor, answered: torch.Size, fits: bool) -> None:
    """Broadcast labels would give a loss, but not the one that was meant."""
    if not fits:
        raise ModelError(
            f"labels of shape {list(labels.shape)} do not fit what the model returned, {list(logits.shape)}: give labels of shape "
            f"{list(answered)}, or the loss (loss=... in Python; a file returns (module, batch, loss))"
        )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that count; zero, not NaN, where none does."""
    if isinstance(logits, PostponedLogits):
        return cross_entropy_in_pieces(logits, labels, IGNORED_LABEL)
    total = F.cross_entropy(
        widened(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


def widened(logits: Tensor) -> Tensor:
    """Losses are computed in fp32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


def default_count(batch: Batch) -> int:
    """Integer labels that count, here or for the model's own loss; without them, samples."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        targets = num_targets(batch) if labels is None else None
        return num_samples(batch) if targets is None else targets
    return int((labels != IGNORED_LABEL).sum())


def answered(module: nn.Module, batch: Batch, objective: Objective) -> Batch:
    """The batch as the module is called with it: labels go to the model where it, and no loss of the user's, answers them."""
    return handed_to_both(module, batch) if objective.is_given else name_labels(batch, who_answers(module, batch))


DEFAULT = Objective(loss=default_loss, count=default_count, is_given=False)


def objective_of(loss: Callable[[Any, Batch], Tensor] | None, count: Callable[[Batch], int] | None) -> Objective:
    """What a user gave, and the default for what not."""
    return Objective(loss or default_loss, count or default_count, is_given=loss is not None)


def tensors_of(batch: Batch) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return [item for item in (batch.values() if isinstance(batch, Mapping) else batch) if isinstance(item, Tensor)]


def num_samples(batch: Batch) -> int:
    return tensors_of(batch)[0].shape[0]


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The same batch with every tensor replaced."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: function(item) if isinstance(item, Tensor) else item for name, item in batch.items()}
    return tuple(function(item) if isinstance(item, Tensor) else item for item in batch)


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Samples start … stop - 1."""
    return map_batch(lambda tensor: tensor[start:stop], batch)
