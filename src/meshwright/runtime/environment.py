"""What a run ran on, for reproduction."""

from __future__ import annotations

import platform
import resource

import torch


def describe_environment(device: torch.device) -> tuple[tuple[str, str], ...]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return (
        ("python", platform.python_version()),
        ("torch", str(torch.__version__)),
        ("device", name),
        ("threads", str(torch.get_num_threads())),
    )


def peak_resident_bytes() -> int:
    """The most memory this process has held on the host."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_bytes(device: torch.device) -> int:
    """Memory in use now: the allocator's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
