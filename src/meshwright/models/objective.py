"""How a batch goes into a model and what its loss is.

A batch is a tensor, a pair `(inputs, labels)`, or a dict: every entry except `labels` is passed to the model by name. The
first dim of every tensor counts samples. Labels stand where the model answers them: for a language model they are already
shifted by one (the model itself never sees them, so it cannot shift them).

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

from meshwright.models.head_loss import PostponedLogits, cross_entropy_in_pieces

IGNORED_LABEL = -100
"""Positions with this label do not count, as in torch and Hugging Face."""

Batch = Tensor | Mapping[str, Tensor] | Sequence[Tensor]


@dataclass(frozen=True)
class Objective:
    loss: Callable[[Any, Batch], Tensor]
    """(what the model returned, batch) → mean loss."""
    count: Callable[[Batch], int]
    """How many things that mean runs over."""


def call(module: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch."""
    if isinstance(batch, Tensor):
        return module(batch)
    if isinstance(batch, Mapping):
        return module(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    return module(*(batch[:-1] if len(batch) > 1 else batch))


def labels_of(batch: Batch) -> Tensor | None:
    """`labels` of a dict, the last of several tensors, or nothing."""
    if isinstance(batch, Tensor):
        return None
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[-1] if len(batch) > 1 else None


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
    """Cross-entropy for integer labels, mean square error for others, the mean of the output without labels."""
    labels = labels_of(batch)
    logits = logits_of(output)
    if labels is None:
        return widened(logits).mean()
    if labels.is_floating_point():
        return F.mse_loss(logits, labels)
    return cross_entropy(logits, labels)


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
    """Integer labels that count; without them, samples."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return num_samples(batch)
    return int((labels != IGNORED_LABEL).sum())


DEFAULT = Objective(loss=default_loss, count=default_count)


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
