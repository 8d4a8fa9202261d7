"""The least seconds of recompute (activation checkpointing) that save a number of bytes, over all units together.

A unit keeps everything, recomputes selectively, or recomputes in full. Taken as divisible, the best choice for a unit is the lower
convex hull of these three points; its edges are the unit's steps. Steps of all units, the cheapest byte first, give the curve.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
Step = tuple[float, float]
"""Bytes saved, and the seconds that this takes."""


def recompute_curve(saved: dict[str, Row], seconds: dict[str, Row]) -> tuple[Row, Row]:
    """(bytes saved, least seconds), both rising from 0. saved, seconds: by mode, one value per unit."""
    points = zip(saved["selective"], seconds["selective"], saved["full"], seconds["full"], strict=True)
    steps = [step for selective, taken, full, longest in points for step in _steps((selective, taken), (full, longest))]
    steps.sort(key=lambda step: step[1] / step[0])
    sums = np.cumsum(np.array([(0.0, 0.0), *steps], dtype=np.float64), axis=0)
    return sums[:, 0], sums[:, 1]


def _steps(*modes: Step) -> list[Step]:
    """The edges of the lower convex hull of nothing saved and these two modes."""
    useful = sorted((saved, max(0.0, seconds)) for saved, seconds in modes if saved > 0)
    if len(useful) < 2:
        return useful
    (less, taken), (more, longer) = useful
    if less == more:
        return [(less, taken)]
    if taken * more < longer * less:
        return [(less, taken), (more - less, max(0.0, longer - taken))]
    return [(more, longer)]


def cheapest_recompute(over: Row, saved: dict[str, Row], longer: dict[str, Row]) -> Row:
    """Seconds to save so many bytes with any mixture of both modes: the lower hull of nothing, selective and full."""
    full, full_seconds = saved["full"], longer["full"]
    selective, selective_seconds = saved["selective"], longer["selective"]
    rate = np.divide(full_seconds, full, out=np.full_like(full, np.inf), where=full > 0)
    own = np.divide(selective_seconds, selective, out=np.full_like(full, np.inf), where=selective > 0)
    steep = np.divide(
        full_seconds - selective_seconds, full - selective, out=np.full_like(full, np.inf), where=full > selective
    )
    by_full = np.where(over <= full, over * np.where(np.isfinite(rate), rate, 0.0), np.inf)
    first = np.where(np.isfinite(own), own, 0.0) * np.minimum(over, selective)
    rest = np.maximum(0.0, over - selective)
    mixed = first + rest * np.where(np.isfinite(steep), steep, 0.0)
    possible = (selective > 0) & (over <= np.maximum(full, selective))
    return np.minimum(by_full, np.where(possible & (own < rate), mixed, np.inf))
