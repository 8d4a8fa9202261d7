"""The stash: tensors that wait for backward, on the device or on the host.

On the host they leave as they are made, on the link's own stream, and are asked back some steps before they are used. At most
IN_FLIGHT leave at a time: where the link is slower than the device, the device waits for it rather than hold ever more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import torch
from torch import Tensor

from meshwright.runtime.offload.host import HostMemory, padded
from meshwright.runtime.offload.link import Arrival, Link

IN_FLIGHT = 4


class Stashed(ABC):
    """One tensor that waits."""

    @abstractmethod
    def request(self) -> None:
        """Begin to bring it back."""

    @abstractmethod
    def take(self) -> Tensor:
        """It, on the device; it may be asked back again, until it is dropped."""

    @abstractmethod
    def drop(self) -> None:
        """Nobody will ask for it again."""


class Stash(ABC):
    host_bytes: int = 0
    """Taken of the host's memory."""

    @abstractmethod
    def keep(self, tensor: Tensor) -> Stashed: ...

    @abstractmethod
    def close(self) -> None:
        """Give the host's memory back."""


class DeviceStash(Stash):
    """Tensors stay where they are."""

    def keep(self, tensor: Tensor) -> Stashed:
        return _Here(tensor.detach())

    def close(self) -> None:
        pass


class _Here(Stashed):
    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def request(self) -> None:
        pass

    def take(self) -> Tensor:
        assert self._tensor is not None, "it was dropped"
        return self._tensor.detach()

    def drop(self) -> None:
        self._tensor = None


class HostStash(Stash):
    def __init__(self, link: Link, device: torch.device, num_expected: int, most_in_flight: int = IN_FLIGHT) -> None:
        """num_expected: how many tensors of a size may wait at a time; host memory is taken for that many at once."""
        self.link, self.device, self.num_expected, self.most_in_flight = link, device, num_expected, most_in_flight
        self.in_flight: deque[_Away] = deque()
        self.device_bytes = self.peak_device_bytes = 0
        """Held on the device for what leaves or comes back."""
        self._free: dict[int, list[Tensor]] = {}
        self._memory: list[HostMemory] = []

    def keep(self, tensor: Tensor) -> Stashed:
        away = _Away(self, _dense(tensor.detach()))
        self.in_flight.append(away)
        while len(self.in_flight) > self.most_in_flight:
            self.in_flight.popleft().let_go()
        return away

    def close(self) -> None:
        for away in self.in_flight:
            away.departure.wait_on_host()
        self.in_flight.clear()
        self._free.clear()
        for memory in self._memory:
            memory.close()
        self._memory.clear()
        self.host_bytes = 0

    def take_room(self, num_bytes: int) -> Tensor:
        free = self._free.setdefault(num_bytes, [])
        if not free:
            total = self.num_expected * padded(num_bytes)
            memory = HostMemory(total, self.device, "the stash of activations")
            self._memory.append(memory)
            self.host_bytes += total
            free += [memory.take(num_bytes, torch.uint8) for _ in range(self.num_expected)]
        return free.pop()

    def give_room(self, room: Tensor) -> None:
        self._free[room.numel()].append(room)

    def hold(self, num_bytes: int) -> None:
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)


class _Away(Stashed):
    """On its way to the host, there, or on its way back."""

    def __init__(self, stash: HostStash, tensor: Tensor) -> None:
        self.stash = stash
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.like = (tensor.shape, tensor.stride(), tensor.dtype)
        self.room: Tensor | None = stash.take_room(self.num_bytes)
        self.departure: Arrival = stash.link.to_host(tensor, self._view(self.room), held=True)
        self.device_tensor: Tensor | None = tensor
        self.arrival: Arrival | None = None
        stash.hold(self.num_bytes)

    def let_go(self) -> None:
        """When it is on the host, the device's memory of it is free."""
        self.departure.wait_on_host()
        self._forget_device()

    def request(self) -> None:
        if self.device_tensor is not None:
            return
        assert self.room is not None, "it was dropped"
        shape, strides, dtype = self.like
        self.stash.hold(self.num_bytes)
        self.device_tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self.stash.device)
        self.stash.link.hold_back()  # its memory may be that of a tensor which is still being read
        self.arrival = self.stash.link.to_device(self._view(self.room), self.device_tensor)

    def take(self) -> Tensor:
        self.request()
        assert self.device_tensor is not None
        if self.arrival is not None:
            self.arrival.wait_on_device()
            self.arrival = None
        return self.device_tensor.detach()

    def drop(self) -> None:
        if self in self.stash.in_flight:
            self.stash.in_flight.remove(self)
            self.departure.wait_on_host()
        self._forget_device()
        if self.room is not None:
            self.stash.give_room(self.room)
        self.room = None

    def _forget_device(self) -> None:
        if self.arrival is not None:
            self.arrival.wait_on_device()  # nobody took it: its memory is not used again before it has come
        if self.device_tensor is not None:
            self.stash.hold(-self.num_bytes)
        self.device_tensor = self.arrival = None

    def _view(self, room: Tensor) -> Tensor:
        shape, strides, dtype = self.like
        return room.view(dtype).as_strided(shape, strides)


def _dense(tensor: Tensor) -> Tensor:
    """Without gaps; a tensor that has none keeps the order of its dims, as kernels of its backward may want it."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor
