"""All checks of one machine, in the order in which one depends on another, and of the links between its ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.core.codec import decode
from meshwright.core.errors import RunError
from meshwright.core.files.cache import cache_folder
from meshwright.measure.checkup import machine, software
from meshwright.measure.checkup.finding import Finding, made, problem
from meshwright.runtime.launch import launch

NUM_RANKS = 2


def check_alone(folder: Path, device: str, backend: str) -> list[Finding]:
    """This machine, and ranks started here for what needs several."""
    findings = check_machine(folder)
    num_ranks, backend = _ranks_here(device, backend)
    try:
        told = launch(
            "meshwright.measure.checkup.between:check_rank", {"device": device, "backend": backend}, num_ranks
        )
        return [*findings, *decode(told, list[Finding], "the ranks")]
    except RunError as error:
        words = f"{num_ranks} ranks could not talk to each other: {error}"
        return [*findings, problem("links", words, "see the message")]


def _ranks_here(device: str, backend: str) -> tuple[int, str]:
    """All GPUs; one GPU is shared by two ranks, which only gloo can."""
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    return (count, backend) if count > 1 else (NUM_RANKS, "gloo" if count else backend)


def check_machine(folder: Path) -> list[Finding]:
    """The checks that need no other ranks. folder: where runs would be written."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": software.check_python,
        "torch": software.check_torch,
        "backends": software.check_backends,
        "devices": machine.check_devices,
        "peers": machine.check_peers,
        "shared memory": machine.check_shared_memory,
        "open files": machine.check_descriptors,
        "disk": lambda: machine.check_disk(folder),
        "cache": lambda: machine.check_cache(cache_folder()),
        "clock": machine.check_clock,
        "ports": machine.check_ports,
        "host name": machine.check_name,
        "compiler": software.check_compiler,
        "offloaded updates": software.check_update,
        "extras": software.check_extras,
    }
    return [made(name, check) for name, check in checks.items()]
