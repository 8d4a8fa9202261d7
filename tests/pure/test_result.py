"""Results: the choice in words, and parts that add up."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import hand_plan, quick, values

from meshwright.core.collective import Collective, total
from meshwright.core.estimate import Estimate, MemoryParts, TimeParts
from meshwright.core.plan import Mesh, Offload, Plan, Recompute, Stage
from meshwright.core.result import RunnerUp, SearchResult, describe
from meshwright.core.run.trace import StepRecord

ESTIMATE = Estimate(
    step_seconds=0.25,
    time_seconds=TimeParts(forward=0.1, backward=0.15),
    peak_bytes=3 * 2**30,
    memory_bytes=MemoryParts(parameters=3 * 2**30),
    host_bytes=0,
    tokens_per_second=123456.7,
    model_flops_utilisation=0.5,
    budget_bytes=8 * 2**30,
    fits=True,
)


def flat_plan(dp: int, **changes: Any) -> Plan:
    stages = (Stage(coordinate=0, blocks=("blocks.0-7",)),)
    return hand_plan(mesh=Mesh(dp=dp), stages=stages, global_batch=8 * dp, **changes)


def result_with(num_runners_up: int) -> SearchResult:
    others = [
        RunnerUp(plan=flat_plan(2), step_seconds=1.0, peak_bytes=1, reason=f"reason {number}")
        for number in range(num_runners_up)
    ]
    return SearchResult(
        plan=flat_plan(4), estimate=ESTIMATE, runners_up=tuple(others), num_candidates=96, search_seconds=0.012
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (flat_plan(1), "one device · 4 microbatches of 2 · fp32"),
        (flat_plan(8), "dp 8 · replicated · 4 microbatches of 2 · fp32"),
        (flat_plan(8, zero=2, precision="bf16"), "dp 8 · ZeRO 2 · 4 microbatches of 2 · bf16"),
        (flat_plan(8, zero=3, hybrid=4), "dp 8 · ZeRO 3 in groups of 4 · 4 microbatches of 2 · fp32"),
        (flat_plan(1, microbatch=8, num_microbatches=1), "one device · 1 microbatch of 8 · fp32"),
        (
            flat_plan(1, offload=Offload(what="optimizer")),
            "one device · 4 microbatches of 2 · offload optimizer · fp32",
        ),
    ],
)
def test_a_plan_in_a_few_words(plan: Plan, words: str) -> None:
    assert describe(plan) == words


def test_recompute_modes_are_each_named_once() -> None:
    rules = [Recompute(mode=mode, blocks=(f"blocks.{i}",)) for i, mode in enumerate(("full", "selective", "full"))]
    assert " · recompute full + selective · " in describe(flat_plan(1, recompute=tuple(rules)))


def test_every_axis_is_named() -> None:
    words = describe(hand_plan(mesh=Mesh(pp=2, dp=2, cp=3, tp=4, ep=2)))
    assert words.startswith("pp 2 · dp 2 · cp 3 · tp 4 · ep 2 · ")


def test_a_result_prints_the_choice_and_why_the_others_lost() -> None:
    first, second, *others = str(result_with(2)).splitlines()
    assert first.startswith(describe(flat_plan(4)))
    assert "250.0 ms per step, 3.00 GiB of 8.00 GiB per device, 123,457 tokens/s" in first
    assert second == "96 candidates in 12.0 ms; the runners-up:"
    assert others == [f"  {describe(flat_plan(2))}: reason {number}" for number in range(2)]


def test_a_result_prints_five_runners_up_at_most() -> None:
    assert "reason 4" in str(result_with(7))
    assert "reason 5" not in str(result_with(7))


def test_a_lone_result_promises_no_runners_up() -> None:
    assert "runners-up:" not in str(result_with(0))


@quick
@given(values(MemoryParts))
def test_memory_parts_add_up_exactly(parts: MemoryParts) -> None:
    assert parts.total == sum(msgspec.to_builtins(parts).values())


def test_time_parts_add_up() -> None:
    names = TimeParts.__struct_fields__
    parts = TimeParts(**{name: 2.0**power for power, name in enumerate(names)})
    assert parts.total == 2 ** len(names) - 1
    assert parts.forward_total == parts.forward + parts.exposed_gather
    assert parts.backward_total == parts.backward + parts.recompute + parts.exposed_reduce


@quick
@given(st.lists(values(Collective), max_size=8), st.randoms(use_true_random=False))
def test_collectives_add_up_by_kind_and_axis(calls: list[Collective], random: st.randoms) -> None:
    rows = total(calls)
    assert len({(row.kind, row.axis) for row in rows}) == len(rows)
    assert sum(row.count for row in rows) == sum(call.count for call in calls)
    assert total(rows) == rows
    random.shuffle(calls)
    assert total(calls) == rows


def test_collectives_in_one_row() -> None:
    call = Collective(kind="all_reduce", axis="dp", count=2, total_bytes=64)
    other = Collective(kind="all_gather", axis="dp", count=1, total_bytes=8)
    empty = Collective(kind="broadcast", axis="tp", count=0, total_bytes=0)
    assert total([call, other, empty, call]) == (
        other,
        Collective(kind="all_reduce", axis="dp", count=4, total_bytes=128),
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_diverged_survives_its_file(loss: float) -> None:
    record = StepRecord(step=3, loss=loss, seconds=0.1, time_seconds=TimeParts(), tokens=64)
    assert repr(StepRecord.from_toml(record.to_toml()).loss) == repr(loss)
    assert repr(StepRecord.from_json(record.to_json()).loss) == repr(loss)
