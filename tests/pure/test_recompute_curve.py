"""No choice of recompute for each unit saves bytes in less time than the curve says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from meshwright.searching.recompute_curve import recompute_curve

amounts = st.integers(-2, 20).map(float)
units = st.lists(st.tuples(amounts, amounts, amounts, amounts, st.sampled_from([0, 1, 2])), min_size=1, max_size=8)


@quick
@given(units)
def test_no_choice_is_below_the_curve(units: list[tuple[float, float, float, float, int]]) -> None:
    """units: bytes saved and seconds of selective, then of full recompute, and which of the two a unit has, if any."""
    rows = np.array([unit[:4] for unit in units])
    saved, seconds = {"selective": rows[:, 0], "full": rows[:, 2]}, {"selective": rows[:, 1], "full": rows[:, 3]}
    curve = recompute_curve(saved, seconds)
    taken = [(0.0, 0.0, unit[0], unit[1], unit[2], unit[3]) for unit in units]
    bytes_saved = sum(row[2 * unit[4]] for row, unit in zip(taken, units, strict=True))
    longer = sum(max(0.0, row[2 * unit[4] + 1]) for row, unit in zip(taken, units, strict=True))
    assert np.interp(bytes_saved, *curve) <= longer + 1e-9


def test_the_cheap_bytes_come_first() -> None:
    """Two units whose selective recompute saves half of the bytes in a tenth of the time."""
    saved, seconds = {"selective": 50.0, "full": 100.0}, {"selective": 1.0, "full": 10.0}
    curve = recompute_curve(*({mode: np.full(2, value) for mode, value in row.items()} for row in (saved, seconds)))
    for wanted, expected in ((0, 0), (50, 1), (100, 2), (150, 11), (200, 20)):
        assert np.interp(wanted, *curve) == pytest.approx(expected)
