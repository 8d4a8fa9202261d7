"""Marks in time on the device the work runs on. On a GPU a mark is an event: nothing waits until someone asks."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Mark(Protocol):
    def seconds_until(self, later: Mark) -> float: ...


class HostMark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, HostMark)
        return later.at - self.at


class DeviceMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, DeviceMark)
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3


def mark(device: torch.device) -> Mark:
    return DeviceMark() if device.type == "cuda" else HostMark()
