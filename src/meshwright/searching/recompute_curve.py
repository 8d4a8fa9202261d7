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
