"""What one process carries from microbatch to microbatch, run as the ranks of a plan carry it.

Each dp rank changes buffers, counters and what else a forward leaves behind by its own samples; before the next forward the
first rank's buffers count, as DistributedDataParallel sends them round. One process comes to the same by running the
microbatches of all ranks from one state, and keeping what the first rank's leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from meshwright.models.objective import Batch
from meshwright.models.snapshot import Snapshot


def carries_state(module: nn.Module, run: Callable[[], Tensor]) -> bool:
    """Whether a forward leaves behind something that a later one may see, or a term of the loss that only it has seen."""
    before = _whole(module)
    drawn = torch.get_rng_state()
    try:
        run()
        first = Snapshot(module.modules())
        run()
        kept = (*first.set_attributes().values(), *(item for item, _ in first.filled()))
        return bool(first.written() or first.replaced_buffers() or kept)
    finally:
        before.restore()
        torch.set_rng_state(drawn)


def from_one_state(module: nn.Module, groups: Iterable[Batch]) -> Iterator[Batch]:
    """Microbatches of the dp ranks at one time, the first rank's last: it is what the next ones begin with."""
    start = _whole(module)
    for group in reversed(list(groups)):
        start.restore()
        yield group


def _whole(module: nn.Module) -> Snapshot:
    return Snapshot(module.modules(), (*module.parameters(), *module.buffers()))
