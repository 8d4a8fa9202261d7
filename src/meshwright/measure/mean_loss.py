"""Whether the loss of a batch is the mean of its parts', as every plan that cuts the batch takes it to be.

    loss(A ∪ B) = (count(A) · loss(A) + count(B) · loss(B)) / (count(A) + count(B))

Microbatches and data-parallel ranks see parts of the global batch, and their losses are put together like that. It does not
hold for a contrast between the samples of a batch, for a sum, for a mean over something else than `count` counts, and for
products of means (the balance of experts). The two sides are computed in float64 without random parts; batch norms use what
they know of the past, since the reference of a parity run gives them the groups they will see.

A model or a loss that is meant to be computed on each microbatch alone, as torch's DDP does, says `depends_on_batch = True`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import nn

from meshwright.core.errors import MeshwrightError, ModelError, PlanError
from meshwright.core.plan import Plan
from meshwright.measure.exact import exact, widened, widened_batch, widened_loss
from meshwright.measure.silence import silence, silence_modules
from meshwright.models.examples import repeat_samples
from meshwright.models.labels import IGNORED_LABEL, LABELS, SHIFTED, TAKEN, check_shift, taken_labels
from meshwright.models.objective import Batch, Objective, call, num_samples, slice_batch
from meshwright.models.source import ModelSource

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TOLERANCE = 1e-9
"""Of float64 sums in another order, relative to the largest loss; wrong means are off by far more."""
SAMPLES, FIRST = 8, 3
"""Of the batch and of its first part. The parts differ in size: an example of two samples, repeated, has two halves that are
alike, and what is computed over them too."""


@dataclass(frozen=True)
class WholeBatchLoss:
    """A loss that is not the mean of its parts'."""

    whole: float
    parts: tuple[float, float]
    counts: tuple[int, int]
    is_mean_unmasked: bool = False
    """Whether it is the mean of its parts' where every label of the batch counts."""

    @property
    def mean(self) -> float:
        return _mean(self.parts, self.counts)

    @property
    def words(self) -> str:
        """What it is, where that can be told."""
        total = sum(self.parts)
        if _is_close(self.whole, total):
            return "it is a sum over the batch: make it a mean (reduction='mean')"
        if _is_close(self.whole, _mean(self.parts, (FIRST, SAMPLES - FIRST))):
            return (
                "it is a mean over samples, not over the labels that count: give the count of samples as `count` "
                "(mw.apply(..., count=...); a file returns (module, batch, loss, count))"
            )
        if self.is_mean_unmasked:
            return (
                "it adds a mean over the labels that count to one over something else (tokens, samples: an auxiliary loss), and "
                "parts of a batch with different numbers of labels that count (-100 marks others) do not add up to it"
            )
        return (
            "it sees samples of the batch together (a contrast, a product of means), or its mean runs over other things"
        )

    def refusal(self, plan: Plan) -> PlanError:
        return PlanError(
            f"the loss of a batch is not the mean of its parts': {self.whole:.6g} for {SAMPLES} samples, "
            f"{self.parts[0]:.6g} for the first {FIRST} and {self.parts[1]:.6g} for the others, together {self.mean:.6g}; "
            f"{self.words}. The plan cuts "
            f"the batch (dp={plan.mesh.dp}, {plan.num_microbatches} microbatches): use dp=1 and microbatch={plan.global_batch} "
            "(tp, cp and pp may divide the model), or, if the loss is to be computed on each microbatch alone as in DDP, set "
            "depends_on_batch = True on the module or the loss function"
        )


def cuts_batch(plan: Plan) -> bool:
    return plan.mesh.dp > 1 or plan.num_microbatches > 1


def depends_on_batch(module: nn.Module, objective: Objective) -> bool:
    """Whether a part of the model, or the loss, says that what it computes belongs to each microbatch alone."""
    parts = (*module.modules(), objective.loss)
    return any(getattr(part, "depends_on_batch", False) is True for part in parts)


def check_mean_loss(build: Callable[[], nn.Module], batch: Batch, objective: Objective, plan: Plan) -> None:
    """Refuse a plan that cuts the batch of a loss that sees all of it, and a loss that changes from call to call."""
    check_same_again(build, batch, objective)
    found = find_whole_batch_loss(build, batch, objective) if cuts_batch(plan) else None
    if found is not None:
        raise found.refusal(plan)


def find_in_source(source: ModelSource) -> WholeBatchLoss | None:
    """The same for a named model, which is small; None where it has no example to run."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return source.build()

    if source.example is None:
        return None
    check_same_again(build, source.example(SAMPLES), source.objective)
    return find_whole_batch_loss(build, source.example(SAMPLES), source.objective)


def check_same_again(build: Callable[[], nn.Module], batch: Batch, objective: Objective) -> None:
    """Refuse a loss of the user's that keeps something from call to call (a running mean, a counter of steps): it is called
    once for every microbatch, on every rank that computes losses, and each would keep something else."""
    if not objective.is_given:
        return
    batch = repeat_samples(batch)(SAMPLES)
    parts = (batch, slice_batch(batch, 0, FIRST), batch)
    before, _, after = (loss_in_one_process(build(), part, objective) for part in parts)
    if not _is_close(before, after):
        raise ModelError(
            f"the loss gives another value for the same model and batch when it is called again ({before:.6g}, then {after:.6g}): "
            "it keeps something from call to call, and a plan calls it once for every microbatch on every rank. Compute it from "
            "the output and the batch alone: keep running means as buffers that the model's forward updates and returns, and "
            "give coefficients that change by step as entries of the batch"
        )


def find_whole_batch_loss(build: Callable[[], nn.Module], batch: Batch, objective: Objective) -> WholeBatchLoss | None:
    """build: gives the same small module at every call, since forward may change it."""
    if depends_on_batch(build(), objective):
        return None
    batch = repeat_samples(batch)(SAMPLES)
    if not objective.is_given:
        check_shift(lambda part: loss_in_one_process(build(), part, objective), batch, tolerance=TOLERANCE)
    masked = masked_if_taken(build, batch, objective)
    found = _cut_in_two(build, masked, objective)
    if _is_close(found.whole, found.mean):
        return None
    unmasked = _cut_in_two(build, batch, objective)
    return replace(found, is_mean_unmasked=masked is not batch and _is_close(unmasked.whole, unmasked.mean))


def _cut_in_two(build: Callable[[], nn.Module], batch: Batch, objective: Objective) -> WholeBatchLoss:
    parts = slice_batch(batch, 0, FIRST), slice_batch(batch, FIRST, SAMPLES)
    whole, first, second = (loss_in_one_process(build(), part, objective) for part in (batch, *parts))
    return WholeBatchLoss(whole, (first, second), (objective.count(parts[0]), objective.count(parts[1])))


def masked_unevenly(batch: Batch) -> Batch:
    """Sample i of a text batch does not count its first i mod 5 labels, so that a mean over anything else shows."""
    name = next((name for name in (LABELS, TAKEN, SHIFTED) if isinstance(batch, dict) and name in batch), None)
    if not isinstance(batch, dict) or name is None or batch[name].dim() < 2 or batch[name].is_floating_point():
        return batch
    positions = torch.arange(batch[name].shape[1])
    ignored = positions[None, :] < (torch.arange(batch[name].shape[0]) % 5)[:, None]
    return {**batch, name: batch[name].masked_fill(ignored, IGNORED_LABEL)}


def masked_if_taken(build: Callable[[], nn.Module], batch: Batch, objective: Objective) -> Batch:
    """The same, where the loss can be computed so: one of the user's, or the model's own, may look labels up that are none."""
    masked = masked_unevenly(batch)
    return masked if masked is batch or takes_masked(build, batch, objective) else batch


def takes_masked(build: Callable[[], nn.Module], batch: Batch, objective: Objective) -> bool:
    if not objective.is_given and taken_labels(batch) is None:
        return True
    try:
        return isfinite(loss_in_one_process(build(), masked_unevenly(batch), objective))
    except ModelError:
        return False


def loss_in_one_process(module: nn.Module, batch: Batch, objective: Objective) -> float:
    """In float64, without random parts; the module is changed for that."""
    module = widened(module)
    silence_modules(module)
    for part in module.modules():
        if isinstance(part, BATCH_NORMS):
            part.eval()
    moved = widened_batch(batch)
    try:
        with exact(), silence(), widened_loss(objective):
            return float(objective.loss(call(module, moved), moved).detach())
    except MeshwrightError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model or its loss fails on {num_samples(batch)} samples of its example batch: {type(error).__name__}: {error}; "
            "check that the module takes the batch, which a dict passes by name without its 'labels'"
        ) from error


def _mean(parts: tuple[float, float], weights: tuple[int, int]) -> float:
    return sum(part * weight for part, weight in zip(parts, weights, strict=True)) / max(sum(weights), 1)


def _is_close(one: float, other: float) -> bool:
    return not abs(one - other) > TOLERANCE * max(abs(one), abs(other), 1e-3)
