"""Memory over time, downsampled: no more points than a picture can show, and none of its peaks lost."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.run.trace import MemoryPoint

MOST_POINTS = 500
"""Of memory over time, per step."""


def downsampled(points: Sequence[MemoryPoint], most: int = MOST_POINTS) -> tuple[MemoryPoint, ...]:
    """All points where they are few; else of each of `most` / 2 equal stretches of time the fullest and the emptiest.

    The first and the last point stay, so that the curve has its beginning and its end.
    """
    if len(points) <= most:
        return tuple(points)
    begin, end = points[0].at_seconds, points[-1].at_seconds
    num_stretches = max(1, most // 2 - 1)
    scale = num_stretches / ((end - begin) or 1.0)
    stretches: dict[int, list[int]] = {}
    for index, point in enumerate(points):
        stretches.setdefault(min(num_stretches - 1, int((point.at_seconds - begin) * scale)), []).append(index)
    totals = [point.memory_bytes.total for point in points]
    kept = {0, len(points) - 1}
    for indices in stretches.values():
        kept |= {max(indices, key=totals.__getitem__), min(indices, key=totals.__getitem__)}
    return tuple(points[index] for index in sorted(kept))
