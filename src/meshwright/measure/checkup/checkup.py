"""All checks of one machine, in the order in which one depends on another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.core.files.cache import cache_folder
from meshwright.measure.checkup import machine, software
from meshwright.measure.checkup.finding import Finding, made


def check_machine(folder: Path) -> list[Finding]:
    """What can be seen without other ranks. folder: where runs would be written."""
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
