"""Hybrid sharding: ZeRO within groups of ranks, replicas across them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases import Case
from pool import RankPool
from test_collectives_and_memory import BROAD, check_categories, check_collectives_and_state, train_on_rank
from test_parity import check, compare_on_rank, scale_one_gradient

from meshwright.core.collective import COUNT_BYTES, LOSS_BYTES, NORM_BYTES, Collective

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", 1, "none", 2, hybrid=2),
        Case("tied", 2, "full", 2, hybrid=2),
        Case("odd", 3, "none", 2, hybrid=2),
        Case("llama", 3, "full", 1, hybrid=2),
        Case("frozen", 2, "none", 1, hybrid=1),
    ],
    ids=str,
)
def test_four_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    check(pool(4).run(compare_on_rank, case, 2))


def test_a_scaled_gradient_is_found(pool: Pools) -> None:
    for result in pool(4).run(compare_on_rank, Case("gpt", 3, "none", 2, hybrid=2), 1, scale_one_gradient):
        assert not result.ok


@pytest.mark.parametrize("hybrid", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_collectives_and_state(pool: Pools, zero: int, hybrid: int) -> None:
    check_collectives_and_state(pool(4), Case("odd", zero, "none", 2, "fp32", hybrid=hybrid))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_memory_by_category(pool: Pools, zero: int) -> None:
    check_categories(pool(4), Case(BROAD, zero, "none", 4, "fp32", samples=16, hybrid=2))


def test_collectives_by_hand(pool: Pools) -> None:
    """As in `test_collectives_of_zero_3_by_hand`: shards of two ranks hold 136 numbers a layer and 44 of the rest. They are
    reduced in each microbatch, and added up across the groups once."""
    seen = pool(4).run(train_on_rank, Case("odd", 3, "none", 2, "fp32", hybrid=2))[0]
    held, microbatches = (3 * 136 + 44) * 4, 2
    assert seen.trace.collectives[1:] == (
        Collective(kind="all_reduce", axis="dp", count=4 + 3, total_bytes=held + COUNT_BYTES + LOSS_BYTES + NORM_BYTES),
        Collective(kind="reduce_scatter", axis="dp", count=4 * microbatches, total_bytes=2 * held * microbatches),
    )
