"""Who answers the labels of a program's batches (models/labels.py): found with the first batch, checked before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from meshwright.models.labels import check_shift, handed_to_both, has_targets, name_labels, who_answers
from meshwright.models.objective import Batch
from meshwright.runtime.gather import is_so_anywhere


class Answers:
    def __init__(self, is_given: bool) -> None:
        """is_given: the loss is the user's own, and so is who answers."""
        self.is_given = is_given
        self._name: str | None = None

    def named(self, module: nn.Module, share: Batch) -> Batch:
        """The batch with its labels under the name that says who answers them."""
        if self.is_given:
            return handed_to_both(module, share)
        if self._name is None:
            self._name = who_answers(module, share)
        return name_labels(share, self._name)

    def check(self, evaluate: Callable[[Iterable[Batch]], float], share: Batch) -> None:
        """Refuse a model that is to shift its labels and does not. Ranks ask together, also one whose samples have no labels."""
        if not self.is_given and has_targets(share):
            check_shift(lambda batch: evaluate([batch]), share, is_so_anywhere)
