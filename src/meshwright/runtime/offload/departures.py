"""Departures: the gradients of the block that goes backward, added up over its microbatches, and their way to the host.

Two buffers on the device take turns: while one is read by the link, the next block fills the other. Gradients add up in the dtype
the plan stores, whatever the block computes in.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime._torch import foreach_copy
from meshwright.runtime.offload.block_home import BlockHome
from meshwright.runtime.offload.host_updates import Arrived, HostUpdates
from meshwright.runtime.offload.link import Arrival, Link
from meshwright.runtime.offload.shards import reduce

NUM_LANES = 2


class Departures:
    def __init__(
        self,
        homes: Mapping[str, BlockHome],
        dtype: torch.dtype,
        device: torch.device,
        link: Link,
        group: dist.ProcessGroup | None,
    ) -> None:
        size = max(home.full_elements for home in homes.values())
        self.link, self.group = link, group
        self._lanes = [torch.empty(size, dtype=dtype, device=device) for _ in range(NUM_LANES)]
        self._departing: list[Arrival | None] = [None] * NUM_LANES
        self._turn = 0
        self._used: set[int] = set()
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        self._views: dict[tuple[int, str], list[Tensor]] = {}
        """Of a lane, for a block, once it has been there."""

    @property
    def num_bytes(self) -> int:
        return sum(lane.numel() * lane.element_size() for lane in self._lanes)

    def begin(self) -> None:
        """A block goes backward: the lane it fills must have been read."""
        self._turn = (self._turn + 1) % NUM_LANES
        departing = self._departing[self._turn]
        if departing is not None:
            departing.wait_on_device()
        self._departing[self._turn] = None
        self._used = set()

    def add(self, home: BlockHome, parameters: list[nn.Parameter]) -> None:
        """What one microbatch's backward left in them."""
        gradients = {number: one.grad for number, one in enumerate(parameters) if one.grad is not None}
        for parameter in parameters:
            parameter.grad = None
        views = self._views_of(home)
        first = [number for number in gradients if number not in self._used]
        again = [number for number in gradients if number in self._used]
        if first:
            foreach_copy([views[number] for number in first], [gradients[number] for number in first])
        for number in again:
            views[number].add_(gradients[number])
        self._used.update(first)

    def send(self, home: BlockHome, updates: HostUpdates) -> None:
        if not home.trainable:
            return
        self._fill_up(home)
        local = self._lane[: home.full_elements]
        if self.group is not None:
            local = reduce(home, self._lane, self._has_gradient(home), self.group)
        buffer = updates.take_buffer()
        arrival = self.link.to_host(local, buffer[: local.numel()])
        self._departing[self._turn] = arrival
        used = frozenset(self._used) if self.group is None else None
        updates.submit(Arrived(home, used, buffer, arrival))

    def _fill_up(self, home: BlockHome) -> None:
        """Ranks add up the same parameters: one without a gradient adds nothing."""
        for number, view in enumerate(self._views_of(home)):
            if number not in self._used:
                view.zero_()

    def _has_gradient(self, home: BlockHome) -> Tensor:
        """Kept: a copy to a device would wait for it."""
        key = tuple(number in self._used for number in range(len(home.members)))
        if key not in self._flags:
            self._flags[key] = torch.tensor(key, dtype=self._lane.dtype, device=self._lane.device)
        return self._flags[key]

    def _views_of(self, home: BlockHome) -> list[Tensor]:
        key = (self._turn, home.name)
        if key not in self._views:
            self._views[key] = home.full_views(self._lane)
        return self._views[key]

    @property
    def _lane(self) -> Tensor:
        return self._lanes[self._turn]
