"""The window: the few blocks whose parameters are on the device, and those on their way there.

Each slot holds one block. A block that is entered computes with its slot's memory in place of its home's; the one before leaves,
and its slot takes the next that is wanted, while the entered one runs. What a slot holds stays good until it is needed for
another block, or its home was updated: the last blocks of a forward are there when backward begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime.offload.block_home import BlockHome
from meshwright.runtime.offload.link import Arrival, Link
from meshwright.runtime.offload.shards import gather


@dataclass
class Slot:
    arriving: Tensor
    """What comes over the link; of a block that is cut over ranks, this rank's part."""
    full: Tensor
    """What the block computes with: the same memory where nothing is cut."""
    block: str = ""
    arrival: Arrival | None = None
    last_used: int = 0
    parameters: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    """Views of `full` that each block computes with, once it has been here."""


class Window:
    def __init__(
        self,
        homes: Mapping[str, BlockHome],
        size: int,
        link: Link,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """group: the ranks that blocks are cut over."""
        self.homes, self.link, self.group = homes, link, group
        self.slots = [self._slot(device) for _ in range(min(size, len(homes)))]
        self.current = ""
        self.parameters: list[nn.Parameter] = []
        """Of the block that is entered."""
        self.num_fetched = 0
        self._clock = 0

    @property
    def num_bytes(self) -> int:
        """On the device."""
        cut = self.group is not None
        return sum(_bytes(slot.full) + (_bytes(slot.arriving) if cut else 0) for slot in self.slots)

    def enter(self, name: str, ahead: Iterable[str]) -> None:
        """Let a block compute; then begin to bring those that follow it."""
        if self.current != name:
            self.leave()
            self.fetch(name)
            slot = self._holding(name)
            assert slot is not None
            self._arrive(slot)
            self._clock += 1
            slot.last_used = self._clock
            home, self.current = self.homes[name], name
            self.parameters = self._parameters(slot, home)
            home.put(self.parameters)
        wanted = [name, *ahead][: len(self.slots)]
        for following in wanted[1:]:
            self.fetch(following, wanted)

    def leave(self) -> None:
        if self.current:
            self.homes[self.current].restore()
        self.current, self.parameters = "", []

    def fetch(self, name: str, kept: Iterable[str] = ()) -> None:
        """Begin to bring a block; nothing where it is there or on its way. kept: blocks that must not give way to it."""
        if self._holding(name) is not None:
            return
        free = [slot for slot in self.slots if slot.block not in kept or not slot.block]
        slot = min(free, key=lambda slot: slot.last_used if slot.block else -1)
        working = self.homes[name].working
        slot.block = name
        self.link.hold_back()  # until the block that was there before has run
        slot.arrival = self.link.to_device(working, slot.arriving[: working.numel()])
        self.num_fetched += 1

    def forget(self, name: str) -> None:
        """Its home changes: what a slot holds of it is no longer good."""
        slot = self._holding(name)
        if slot is not None:
            slot.block = ""

    def forget_all(self) -> None:
        self.leave()
        for slot in self.slots:
            slot.block = ""

    def _parameters(self, slot: Slot, home: BlockHome) -> list[nn.Parameter]:
        if home.name not in slot.parameters:
            slot.parameters[home.name] = [
                nn.Parameter(view, member.trainable)
                for view, member in zip(home.full_views(slot.full), home.members, strict=True)
            ]
        return slot.parameters[home.name]

    def _arrive(self, slot: Slot) -> None:
        if slot.arrival is None:
            return
        slot.arrival.wait_on_device()
        slot.arrival = None
        if self.group is not None:
            gather(self.homes[slot.block], slot.arriving, slot.full, self.group)

    def _holding(self, name: str) -> Slot | None:
        return next((slot for slot in self.slots if slot.block == name), None)

    def _slot(self, device: torch.device) -> Slot:
        homes = list(self.homes.values())
        dtype = homes[0].working.dtype
        arriving = torch.empty(max(home.local_elements for home in homes), dtype=dtype, device=device)
        if self.group is None:
            return Slot(arriving, arriving)
        return Slot(arriving, torch.empty(max(home.full_elements for home in homes), dtype=dtype, device=device))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
