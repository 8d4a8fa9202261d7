"""How many microbatches coordinates with several stages hold at least, and what that says of deep models."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machine
from strategies import quick
from test_bounds import by_constants
from transformer import transformer_graph

from meshwright.core.errors import PlanError, ScheduleError
from meshwright.core.pipeline.kinds import KINDS, ScheduleKind, in_flight, kind_of
from meshwright.core.request import PlanRequest
from meshwright.searching.bounds import held_microbatches as held_file
from meshwright.searching.bounds.held_microbatches import held_by_like_stages, held_microbatches, most_held
from meshwright.searching.joint.best_first import BestFirst
from meshwright.searching.joint.candidates import Drafts
from meshwright.searching.memory_saving.recompute import fitted
from meshwright.searching.problem import Problem
from meshwright.searching.space import Point, Shape

SEVERAL = [name for name, kind in KINDS.items() if kind.has_turns and not kind.keeps_all]


@pytest.mark.parametrize("name", SEVERAL)
@quick
@given(st.integers(1, 12), st.integers(1, 30), st.integers(2, 4), st.data())
def test_no_shares_of_a_coordinate_hold_less(name: ScheduleKind, p: int, m: int, v: int, data: st.DataObject) -> None:
    kind = kind_of(name)
    v, m = min(v, kind.turns[1]), max(m, kind.least_microbatches(p))
    place = data.draw(st.integers(0, p - 1))
    shares = np.array(data.draw(st.lists(st.floats(0.01, 1), min_size=v, max_size=v)))
    shares /= shares.sum()
    moments = held_file._maximal(held_file._counts(kind.order(place, p, m, v), m, v))
    fullest = float((moments @ shares).max())
    assert held_microbatches(name, p, m, v)[place] <= fullest * (1 + 1e-9)
    ratio = float(shares.min() / shares.max())
    assert held_by_like_stages(name, p, m, v, ratio)[place] <= fullest * (1 + 1e-9)
    assert moments.max() <= most_held(name, p, m, v)[place] <= in_flight(name, p, m, v)[place]


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("p", [16, 24, 40])
def test_coordinates_between_those_that_are_looked_at_hold_no_less(
    name: ScheduleKind, p: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [held_file._held.__wrapped__(name, p, 2 * p, 2, ratio) for ratio in (0.0, 0.7)]
    monkeypatch.setattr(held_file, "MANY_COORDINATES", p)
    held_file._moments.cache_clear()
    every = [held_file._held.__wrapped__(name, p, 2 * p, 2, ratio) for ratio in (0.0, 0.7)]
    held_file._moments.cache_clear()
    for some, all_of_them in zip(few, every, strict=True):
        assert all(a <= b * (1 + 1e-6) for a, b in zip(some, all_of_them, strict=True))


@quick
@given(
    st.integers(14, 26),
    st.sampled_from(
        [("1f1b", 4, 1), ("1f1b", 8, 1), ("zb", 4, 1), ("interleaved", 4, 2), ("interleaved", 2, 3), ("zbv", 4, 2)]
    ),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([4, 8]),
    st.sampled_from([0.35, 0.5, 0.7, 0.9]),
    st.sampled_from(["constants", "rates"]),
    st.randoms(use_true_random=False),
)
def test_no_plan_of_a_deep_model_is_faster_than_what_coordinates_have_memory_for(
    layers: int,
    turns: tuple[ScheduleKind, int, int],
    zero: int,
    dp: int,
    m: int,
    share: float,
    rates: str,
    random: Random,
) -> None:
    """share: of the memory that the plan needs without recompute. The stages are of like size, as the search makes them."""
    schedule, pp, virtual = turns
    graph = transformer_graph(layers=layers, heads=2, vocab=256)
    cluster = machine(pp * dp) if rates == "rates" else by_constants(pp * dp, 1e9, 1)
    cluster = msgspec.structs.replace(cluster, num_hosts=1, devices_per_host=pp * dp)
    problem = Problem(graph, cluster, PlanRequest(global_batch=dp * m))
    point = Point(Shape(pp, dp, 1, 1, 1, False, 1, m, False), schedule, virtual, zero if dp > 1 else 0)  # type: ignore[arg-type]
    cut = _like_sizes(layers + 2, point.num_stages, random)
    plan = Drafts(problem).plan(point, cut)
    if plan is None:
        return
    budget = round(share * problem.cost(plan).needed_bytes)
    problem = Problem(graph, cluster, PlanRequest(global_batch=dp * m), budget_bytes=budget)
    search = BestFirst(problem, Drafts(problem))
    drafts = search.drafts
    bounds, room = drafts.bounds(point), drafts.room(point)
    assert bounds is not None
    assert room is not None
    try:
        found = fitted(problem, point, cut, plan, bounds.table, drafts.tables.microbatch(plan), must_fit=True)
    except (PlanError, ScheduleError):
        return
    if found is not None and found[1].fits:
        seconds = found[1].step_seconds * (1 + 1e-9)
        assert drafts.of_coordinates(point) <= seconds
        assert bounds.of_every_cut(room, drafts.of_coordinates(point)) <= seconds
        assert search._shape_bound(point.shape) <= seconds


def _like_sizes(num_units: int, num_stages: int, random: Random) -> tuple[int, ...]:
    """Stages that differ by a unit at most, in any order."""
    size, more = divmod(num_units, num_stages)
    larger = set(random.sample(range(num_stages), more))
    ends = np.cumsum([size + (stage in larger) for stage in range(num_stages)])
    assert all(begin < end for begin, end in pairwise((0, *ends)))
    return tuple(int(end) for end in ends)
