"""Our orders of work on stock torch: its validator and its own send and receive pass take every one of them.

Where torch has the same schedule and takes the same sizes, ours is word for word the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as stock

from meshwright.core.pipeline.kinds import KINDS, ScheduleKind, kind_of, placement_of
from meshwright.core.pipeline.placement import coordinate_of
from meshwright.rules.schedules import make_order

TORCH_KINDS = {"forward": stock.F, "backward": stock.B, "backward_inputs": stock.I, "backward_weights": stock.W}
SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 5, 8, 9, 12) if m >= p]

Rows = dict[int, list[Any]]


def ours(kind: ScheduleKind, p: int, m: int, v: int) -> Rows:
    return {
        c: [stock._Action(action.stage, TORCH_KINDS[action.kind], action.microbatch) for action in row]
        for c, row in enumerate(make_order(kind, p, m, v))
    }


def theirs(schedule: Any, p: int, m: int, v: int) -> Rows:
    """What a torch schedule computes on every rank, without the stages it would run."""
    bare = object.__new__(schedule)
    bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = p, v, m
    bare.num_stages = bare._num_stages = p * v
    bare.number_of_rounds = max(1, m // p)
    bare.microbatches_per_round = m // bare.number_of_rounds
    rows = {rank: bare._calculate_single_rank_operations(rank) for rank in range(p)}
    return {
        rank: [part for action in row if action for part in (action.sub_actions or (action,))]
        for rank, row in rows.items()
    }


def stages_of(kind: ScheduleKind) -> int:
    return kind_of(kind).turns[0]


@pytest.mark.parametrize("kind", KINDS)
def test_torch_takes_every_order(kind: ScheduleKind) -> None:
    v = stages_of(kind)
    for p, m in SIZES:
        if m < kind_of(kind).least_microbatches(p):
            continue
        rows = ours(kind, p, m, v)
        stock._validate_schedule(rows, p, p * v, m)
        homes = [coordinate_of(stage, p, placement_of(kind)) for stage in range(p * v)]
        stock._add_send_recv(rows, homes.__getitem__, p * v)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("interleaved", stock.ScheduleInterleaved1F1B),
        ("zb", stock.ScheduleInterleavedZeroBubble),
        ("dualpipev", stock.ScheduleDualPipeV),
    ],
)
def test_orders_are_those_of_torch(kind: ScheduleKind, schedule: Any) -> None:
    v = stages_of(kind)
    for p, m in SIZES:
        if m % max(1, m // p) == 0 and m >= kind_of(kind).least_microbatches(p):
            assert ours(kind, p, m, v) == theirs(schedule, p, m, v)
