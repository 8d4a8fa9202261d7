"""The link between a device and its host: copies that run beside the computation, one stream each way.

    call                      the copy waits for                      who waits for the copy
    to_host(source, target)   what the device was given so far        Arrival.wait_on_host
    to_device(source, target) nothing: the host has made the source   Arrival.wait_on_device

Where the device is the host (CPU), a thread each way stands in for the streams, as slow as it is told to be: ordering, waiting
and memory are then the same as with a GPU, and can be tested without one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

BLOCKS_AHEAD = 3
"""Enough for the device never to wait for a launch."""


class Arrival(ABC):
    """A copy on its way."""

    @abstractmethod
    def wait_on_host(self) -> None:
        """Until it is there; what failed on the way is raised here."""

    @abstractmethod
    def wait_on_device(self) -> None:
        """What the device is given from now on starts after it; the host goes on."""

    @abstractmethod
    def is_there(self) -> bool:
        """Without waiting."""


class Link(ABC):
    """One device's link to its host. A source may be dropped at once: it is held until it has been read. A target is somebody's
    until its arrival was waited for."""

    bytes_out: int = 0
    bytes_in: int = 0
    """Moved so far, to the host and to the device."""

    @abstractmethod
    def to_host(self, source: Tensor, target: Tensor, held: bool = False) -> Arrival:
        """held: the source is not dropped before it has arrived. An allocator may use its memory again at once then; else only
        after all that is on this way when it is dropped."""

    @abstractmethod
    def to_device(self, source: Tensor, target: Tensor) -> Arrival: ...

    @abstractmethod
    def hold_back(self) -> None:
        """Copies to the device from now on start after all that the device was given so far."""

    @abstractmethod
    def pace(self) -> None:
        """Called at every block: who drives the device stays no more than a few blocks ahead of it.

        A launch into a full queue blocks with Python's interpreter in hand; a wait here leaves it to the updates.
        """

    @abstractmethod
    def close(self) -> None:
        """Nothing is copied afterwards."""


def open_link(device: torch.device, bytes_per_second: float | None = None) -> Link:
    """bytes_per_second: how slow a stand-in is each way; a real link is as fast as it is."""
    return CudaLink(device) if device.type == "cuda" else ThrottledLink(bytes_per_second)


class CudaLink(Link):
    """Copies between pinned memory and a GPU by its copy engines."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._passed: deque[torch.cuda.Event] = deque()

    def to_host(self, source: Tensor, target: Tensor, held: bool = False) -> Arrival:
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
            if not held:
                source.record_stream(self._out)
            self.bytes_out += _bytes(target)
            return _Recorded(self._out)

    def to_device(self, source: Tensor, target: Tensor) -> Arrival:
        with torch.cuda.stream(self._in):
            target.copy_(source, non_blocking=True)
            self.bytes_in += _bytes(source)
            return _Recorded(self._in)

    def hold_back(self) -> None:
        self._in.wait_stream(torch.cuda.current_stream(self.device))

    def pace(self) -> None:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        self._passed.append(event)
        if len(self._passed) > BLOCKS_AHEAD:
            self._passed.popleft().synchronize()

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


class _Recorded(Arrival):
    def __init__(self, stream: Any) -> None:
        self.event = torch.cuda.Event(blocking=True)  # who waits for it sleeps, and leaves its core to the updates
        self.event.record(stream)

    def wait_on_host(self) -> None:
        self.event.synchronize()

    def wait_on_device(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def is_there(self) -> bool:
        return bool(self.event.query())


class ThrottledLink(Link):
    """A thread each way that copies no faster than the link it stands for."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self._out = ThreadPoolExecutor(1, "link-to-host")
        self._in = ThreadPoolExecutor(1, "link-to-device")

    def to_host(self, source: Tensor, target: Tensor, held: bool = False) -> Arrival:
        self.bytes_out += _bytes(target)
        return _Promised(self._out.submit(self._copy, source.detach(), target))

    def to_device(self, source: Tensor, target: Tensor) -> Arrival:
        self.bytes_in += _bytes(source)
        return _Promised(self._in.submit(self._copy, source, target.detach()))

    def hold_back(self) -> None:
        """The device is the host: what it was given is done."""

    def pace(self) -> None:
        """The device is the host: nobody is ahead of it."""

    def close(self) -> None:
        for way in (self._out, self._in):
            way.shutdown(wait=True)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        started = time.perf_counter()
        target.copy_(source)
        if self.bytes_per_second is not None:
            left = started + _bytes(target) / self.bytes_per_second - time.perf_counter()
            if left > 0:
                time.sleep(left)


class _Promised(Arrival):
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait_on_host(self) -> None:
        self.future.result()

    def wait_on_device(self) -> None:
        self.future.result()

    def is_there(self) -> bool:
        return self.future.done()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
