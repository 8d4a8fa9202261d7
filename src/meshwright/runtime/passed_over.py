"""Blocks that a rank's forward leaves out, while others call them: layers that are drawn at random (LayerDrop, stochastic depth),
or chosen by the samples.

Ranks gather a sharded block when it is called, and reduce its gradients when its backward ends: each does so with the next block
of the others, whichever that is. So a block that is passed over is gathered all the same, and reduces zeros, at its place in the
order:

    called       0     2  3          what goes into block 2 goes through block 1 first, unchanged:
    gathered     0  1  2  3          block 1 is gathered there in forward, and again in backward, after block 2

A forward that calls a block again, or calls blocks in another order than the plan's, is left as it is. Where what goes in takes no
gradient (all before is frozen), backward does not come that far, and nothing can be put in its order: refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.errors import ModelError
from meshwright.runtime._torch import pass_through, tree_leaves
from meshwright.runtime.messages.exchange import all_ranks


class PassedOver:
    """Of one sharded module."""

    def __init__(self, blocks: dict[str, nn.Module], group: dist.ProcessGroup, has_experts: bool) -> None:
        """blocks: those that are gathered by themselves, in the order of calls. has_experts: over ep, which exchange tokens."""
        self.names, self.blocks, self.group, self.has_experts = list(blocks), list(blocks.values()), group, has_experts
        self.numbers = {part: number for number, part in enumerate(self.blocks)}
        self.next = 0
        self.is_forward = False
        self.called: set[int] = set()
        self.without_gradient: set[int] = set()
        self.is_first = True
        """Until ranks have told each other, after the first forward, which blocks they called."""

    def begin(self) -> None:
        self.next, self.is_forward = 0, True

    def before(self, part: nn.Module, given: Any) -> Any:
        """given: what a block is about to be called with; the same, past the blocks that were left out."""
        number = self.numbers.get(part)
        if number is None or not self.is_forward:  # when a block is run again, its backward has begun
            return given
        if number < self.next:
            self.is_forward = False
            return given
        given = self._past(number, given)
        self._note_call(number, given)
        self.next = number + 1
        return given

    def end(self, result: Any) -> Any:
        """result: of the forward; the same, past the last blocks that were left out."""
        if self.is_forward:
            result = self._past(len(self.blocks), result)
        self.is_forward = False
        if self.is_first:
            self.is_first = False
            self._agree()
        return result

    def _past(self, number: int, given: Any) -> Any:
        for left_out in range(self.next, number):
            if torch.is_grad_enabled():
                self._check(left_out, given)
            given = pass_through(self.blocks[left_out], given)
        return given

    def _check(self, number: int, given: Any) -> None:
        if self.has_experts and not self.is_first and number in self.called:
            raise ModelError(
                f"block '{self.names[number]}' was left out by the forward of this rank, and its experts lie over ep, where every "
                "rank takes part in every call: set ep to 1, or let all ranks call the same blocks"
            )
        if not _takes_gradient(given) and any(
            parameter.requires_grad for parameter in self.blocks[number].parameters()
        ):
            if not self.is_first and number in self.called:
                raise self._refusal(number)
            self.without_gradient.add(number)

    def _note_call(self, number: int, given: Any) -> None:
        if self.is_first:
            self.called.add(number)
        elif number in self.without_gradient and torch.is_grad_enabled() and not _takes_gradient(given):
            raise self._refusal(number)

    def _agree(self) -> None:
        kind = tuple[set[int], set[int]]
        answers = all_ranks((self.called, self.without_gradient), kind, self.group)
        self.called = set.union(*(called for called, _ in answers))
        self.without_gradient = set.union(*(without for _, without in answers))
        odd = self.called & self.without_gradient
        if odd:
            raise self._refusal(min(odd))

    def _refusal(self, number: int) -> ModelError:
        return ModelError(
            f"block '{self.names[number]}' is called by the forward of some dp ranks and left out by others (a layer that is "
            "dropped at random), and no tensor that reaches it takes a gradient, since all before it is frozen: ranks cannot "
            "gather it alike in backward. Use ZeRO 0, set the model's layerdrop to 0, or let an embedding train"
        )


def _takes_gradient(given: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(given))
