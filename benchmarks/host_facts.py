"""What a row on a shared host should say about that host: how much of its processors others took, and what its memory lies in."""

from __future__ import annotations

from pathlib import Path

STEAL = 7
"""Place of stolen time in the first line of /proc/stat; what comes after it is counted in user time already."""


class HostFacts:
    """From when it is made on."""

    def __init__(self) -> None:
        self._before = _ticks()

    def read(self) -> dict[str, float]:
        ticks = [now - before for now, before in zip(_ticks(), self._before, strict=True)]
        return {"stolen_share": round(ticks[STEAL] / max(sum(ticks), 1), 4), "huge_page_bytes": _huge_page_bytes()}


def _ticks() -> list[int]:
    line = Path("/proc/stat").read_text().splitlines()[0]
    return [int(word) for word in line.split()[1:][: STEAL + 1]]


def _huge_page_bytes() -> int:
    """Of this process' own memory that lies in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))
