"""A Tally: what one step adds up, over its microbatches and in the end over the ranks.

    loss = Σ_ranks Σ_microbatches mean_i · count_i / Σ count                                              -> add_loss, output
    each backward runs on  mean_i · count_i · dp · S / Σ count       S: of the loss, under fp16           -> scale

(the factor dp, because data parallelism averages over ranks). Σ count is summed while the first forward runs. Numbers are filled
in where they are: a copy from the host would wait for all that the device was given before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.clock import Mark
from meshwright.runtime.step import StepOutput


@dataclass(frozen=True)
class Peers:
    """The ranks that a step's sums are taken over; None where there are no others."""

    dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None


class Tally:
    def __init__(self, counts: list[int], factor: float, signal: float, others: Peers, device: torch.device) -> None:
        """counts: label tokens of each microbatch. factor: dp · S."""
        self.counts, self.factor, self.others = counts, factor, others
        self.total_count = torch.full((), sum(counts), dtype=torch.float64, device=device)
        self._counting = (
            None if others.dp is None else dist.all_reduce(self.total_count, group=others.dp, async_op=True)
        )
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        if signal:
            self.sums[1] = signal

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        self.sums[0] += loss.detach() * self.counts[microbatch]

    @property
    def loss_sum(self) -> Tensor:
        """This rank's share of loss times tokens so far."""
        return self.sums[:1]

    @property
    def dropped(self) -> Tensor:
        """Two numbers to add to: choices of experts that were dropped, and all choices."""
        return self.sums[2:]

    def scale(self, microbatch: int) -> Tensor:
        """What the microbatch's loss is multiplied by before backward."""
        if self._counting is not None:
            self._counting.wait()
            self._counting = None
        return self.counts[microbatch] * self.factor / self.total_count.clamp(min=1)

    def output(self, marks: list[tuple[str, Mark]], norm: Tensor | None, left_out: bool = False) -> StepOutput:
        """What the step gave; the sums over dp are under way."""
        if self.others.pp is not None:
            dist.all_reduce(self.sums, group=self.others.pp)
        work = None if self.others.dp is None else dist.all_reduce(self.sums, group=self.others.dp, async_op=True)
        return StepOutput(self.sums, self.total_count, work, marks, norm, left_out=left_out)
