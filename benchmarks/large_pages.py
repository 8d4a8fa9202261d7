"""What the memory of a process lies in: figures of a host that updates much of it depend on that."""

from __future__ import annotations

from pathlib import Path


def huge_page_bytes() -> int:
    """Of this process' own memory that lies in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))
