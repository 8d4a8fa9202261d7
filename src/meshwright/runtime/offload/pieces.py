"""Parameters whose optimizer state is on the host, and the pieces they travel in."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.runtime.clip import local
from meshwright.runtime.offload.host import HostMemory, padded
from meshwright.runtime.offload.link import Arrival, Link
from meshwright.runtime.offload.rules import State

PIECE_ELEMENTS = 1 << 24
"""A piece is long enough to run at full speed, and short enough for copies and updates of one parameter to overlap."""


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps for a parameter, by torch's names."""


@dataclass(eq=False)
class Slot:
    """Pinned memory of the device's dtype: a gradient arrives in it and, where the device computes in 16 bits, the new
    parameter leaves from it."""

    memory: Tensor
    is_free: threading.Event = field(default_factory=threading.Event)
    """Whether the last gradient sent here has been read."""


class Return:
    """A new parameter's way back to the device, which may have to wait: for the update, and for the device's last use of the
    old one (delayed updates)."""

    def __init__(self, link: Link, target: Tensor, may_go: bool) -> None:
        self.link, self.target, self.may_go = link, target, may_go
        self.is_on_way = threading.Event()
        self._source: Tensor | None = None
        self._arrival: Arrival | None = None
        self._lock = threading.Lock()

    def offer(self, source: Tensor) -> None:
        """The update is done."""
        with self._lock:
            self._source = source
            self._go()

    def allow(self) -> None:
        """The device has done with the old parameter."""
        with self._lock:
            self.may_go = True
            self._go()

    def _go(self) -> None:
        if self.may_go and self._source is not None:
            self._arrival, self._source = self.link.to_device(self._source, self.target), None
            self.is_on_way.set()

    def wait_on_device(self) -> None:
        """Call once it is on its way."""
        if self._arrival is not None:
            self._arrival.wait_on_device()


@dataclass(eq=False)
class Piece:
    """A stretch of one parameter: sent, updated and returned in one go."""

    on_device: Tensor
    first: int
    last: int
    """Where in its parameter it begins and ends."""
    master: Tensor
    slots: tuple[Slot, ...]
    """Two where an update may be a step late."""
    total: Tensor | None
    """Sum of the gradients of a step's microbatches."""
    state: State
    num_summed: int = 0
    norm: Tensor | None = None
    """Of the sum, where it is to be clipped."""
    newest: Return | None = None
    """What the next forward waits for."""
    late: Return | None = None
    """The update that runs under the step at hand, and returns after it."""


@dataclass(eq=False)
class Shipped:
    """One parameter with its pieces."""

    name: str
    block: str
    """Empty where it is in none."""
    parameter: nn.Parameter
    place: int
    group: State
    """The optimizer's group it is in; its learning rate may change from step to step."""
    master: Tensor
    moments: State
    """Of memory of ours, whole; a rule that makes its own keeps it piece by piece."""
    pieces: list[Piece]
    was_sent: bool = False
    """Whether its gradient of this step has left."""
    has_sum: bool = False
    """Whether those of earlier microbatches have, and wait for the last."""


@dataclass(frozen=True)
class Layout:
    """What each parameter takes of the host."""

    dtype: torch.dtype
    """What the device computes with."""
    master_dtype: torch.dtype
    num_slots: int
    has_sums: bool
    num_moments: int
    """Tensors like a parameter that a rule keeps in memory of ours; others make their own."""
    moment_dtype: torch.dtype

    @property
    def is_narrow(self) -> bool:
        """Whether the device computes with other numbers than the host updates."""
        return self.dtype != self.master_dtype

    def pinned_bytes(self, sizes: Iterable[int]) -> int:
        """Slots; and the masters themselves, where the device has the same numbers and they return as they are."""
        masters = 0 if self.is_narrow else 1
        return sum(
            self.num_slots * padded(size * self.dtype.itemsize) + masters * padded(size * self.master_dtype.itemsize)
            for size in sizes
        )

    def plain_bytes(self, sizes: Iterable[int]) -> int:
        tensors = self.is_narrow + self.has_sums
        return sum(
            tensors * padded(size * self.master_dtype.itemsize)
            + self.num_moments * padded(size * self.moment_dtype.itemsize)
            for size in sizes
        )


def ship(
    name: str, block: str, parameter: nn.Parameter, place: int, group: State, layout: Layout, memory: tuple[HostMemory, HostMemory],
    values: Tensor, by_entry: bool,
) -> Shipped:  # fmt: skip
    """Give a parameter its place on the host: (pinned, plain) memory. values: what its master starts with."""
    pinned, plain = memory
    own = local(parameter.detach())
    master = (plain if layout.is_narrow else pinned).take(own.numel(), layout.master_dtype).view(own.shape)
    master.copy_(values)
    slots = [pinned.take(own.numel(), layout.dtype) for _ in range(layout.num_slots)]
    total = plain.take(own.numel(), layout.master_dtype) if layout.has_sums else None
    moments = [plain.take(own.numel(), layout.moment_dtype) for _ in range(layout.num_moments)]
    pieces = []
    for first, last in _stretches(own, by_entry):
        cut = partial(_cut, first=first, last=last, shape=None if by_entry else own.shape)
        piece = Piece(
            on_device=own.view(-1)[first:last] if by_entry and own.is_contiguous() else own,
            first=first,
            last=last,
            master=cut(master.view(-1)),
            slots=tuple(Slot(cut(slot)) for slot in slots),
            total=None if total is None else cut(total),
            state=dict(zip(MOMENTS, map(cut, moments), strict=False)) | ({"step": 0} if moments else {}),
        )
        for slot in piece.slots:
            slot.is_free.set()
        pieces.append(piece)
    whole = {key: moment.view(own.shape) for key, moment in zip(MOMENTS, moments, strict=False)}
    return Shipped(name, block, parameter, place, group, master, whole, pieces)


def _stretches(own: Tensor, by_entry: bool) -> Iterator[tuple[int, int]]:
    """Where the pieces of a parameter begin and end: one, where it lies in memory in another order than it is counted."""
    step = PIECE_ELEMENTS if by_entry and own.is_contiguous() else max(own.numel(), 1)
    for first in range(0, own.numel(), step):
        yield first, min(first + step, own.numel())


def _cut(tensor: Tensor, first: int, last: int, shape: torch.Size | None) -> Tensor:
    """An optimizer that looks at whole tensors must see their shape."""
    return tensor[first:last] if shape is None else tensor.view(shape)
