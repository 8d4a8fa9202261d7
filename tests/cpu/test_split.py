"""Tensors split over ranks: moves between layouts, the rules of torch functions, which shardings are legal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pool import RankPool
from split_runs import Finding, check_samples
from split_samples import GROUPS, SINGLES, samples_of

from meshwright.core.collective import Axis

Pools = Callable[[int], RankPool]


def check_on_rank(group: str, axis: Axis) -> Finding:
    return check_samples(samples_of(group), axis)


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("group", [*GROUPS, *SINGLES])
def test_functions_on_parts_give_what_they_give_on_the_whole(pool: Pools, group: str, axis: Axis) -> None:
    """They may refuse; they may not be wrong."""
    for finding in pool(2).run(check_on_rank, group, axis):
        assert not finding.wrong, "\n".join(finding.wrong)
