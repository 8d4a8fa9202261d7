"""Plans in words: where each axis lies, stages, state; one screen; what differs between two plans."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from hypothesis import given
from machines import chain_graph, flat_plan, machine, named_machine, plan_for
from rich.console import Console, RenderableType
from strategies import plans, quick

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import MemoryParts, TimeParts
from meshwright.core.plan import Mesh, Offload, Plan, Recompute, Stage
from meshwright.core.result import Claim, Infeasible, RunnerUp, SearchResult, WayOut
from meshwright.cost.communication.links import Group
from meshwright.cost.estimate import estimate
from meshwright.report.differences import (
    changes_table,
    difference_words,
    differences_table,
    estimate_changes,
    plan_differences,
    verdict,
)
from meshwright.report.infeasible import infeasible_view, way_words
from meshwright.report.plan_view import bar, plan_view
from meshwright.report.plan_words import (
    batch_words,
    place_words,
    plan_in_words,
    recompute_words,
    stage_words,
    state_words,
)
from meshwright.report.words import MEMORY_WORDS, TIME_WORDS

GRAPH = chain_graph(48)


def shown(view: RenderableType, width: int = 100) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width).print(view)
    return buffer.getvalue()


def words_of(hosts: int, **request: Any) -> tuple[str, ...]:
    return plan_in_words(plan_for(GRAPH, **request), named_machine(8, hosts), GRAPH)


# Words


def test_the_plan_of_the_issue_reads_as_it_should() -> None:
    first, second, *_ = words_of(4, tp=8, pp=4, microbatch=1, global_batch=16, sequence_parallel=True)
    assert first == "8-way tensor parallel inside each host, with sequence parallel"
    assert second == "4 pipeline stages of 12 blocks, across hosts; schedule 1F1B"


@pytest.mark.parametrize(
    ("group", "world", "words"),
    [
        (Group(4), 4, "inside the host"),
        (Group(8), 64, "inside each host"),
        (Group(4, 2), 64, "inside each host"),
        (Group(16), 64, "across 2 hosts, 8 ranks on each"),
        (Group(8, 4), 64, "across 4 hosts, 2 ranks on each"),
        (Group(8, 8), 64, "across hosts"),
        (Group(2, 16), 64, "across hosts"),
        (Group(3), 24, "unevenly across hosts"),
        (Group(3, 4), 24, "unevenly across hosts"),
    ],
)
def test_where_a_group_lies(group: Group, world: int, words: str) -> None:
    assert place_words(group, named_machine(8, 8), world) == words


@pytest.mark.parametrize(
    ("group_size", "stride"), [(size, stride) for size in (2, 3, 4, 6, 8) for stride in (1, 2, 3, 4, 8)]
)
def test_words_agree_with_the_ranks_of_every_group(group_size: int, stride: int) -> None:
    """Counted rank by rank on eight hosts of eight."""
    span, world = group_size * stride, group_size * stride * 8
    groups = [
        [base + offset + number * stride for number in range(group_size)]
        for base in range(0, world, span)
        for offset in range(stride)
    ]
    hosts = [{rank // 8 for rank in group} for group in groups]
    words = place_words(Group(group_size, stride), named_machine(8, 64), world)
    assert (words == "inside each host") == all(len(found) == 1 for found in hosts)
    assert (words == "across hosts") == all(len(found) == group_size for found in hosts)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((12, 12, 12, 12), "4 pipeline stages of 12 blocks"),
        ((1, 1), "2 pipeline stages of 1 block"),
        ((11, 13, 13, 11), "4 pipeline stages of 11, 13, 13 and 11 blocks"),
        ((3, *([4] * 10), 2), "12 pipeline stages of 4 blocks (stage 0 of 3 and stage 11 of 2)"),
        ((0, 4, 4, 0), "4 pipeline stages: the embedding, 2 of 4 blocks, the head"),
        ((5, 3, 0), "3 pipeline stages: 2 of 5 and 3 blocks, the head"),
        ((1, 2, 3, 4, 5, 6, 7, 8, 9, 3), "10 pipeline stages of 1 to 9 blocks"),
    ],
)
def test_stages(counts: tuple[int, ...], words: str) -> None:
    assert stage_words(staged(counts)) == words


def staged(counts: tuple[int, ...], **changes: Any) -> Plan:
    """A pipeline with so many blocks a stage, an embedding before and a head behind."""
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    names = [[f"blocks.{first + k}" for k in range(count)] for first, count in zip(firsts, counts, strict=True)]
    names[0].insert(0, "embed")
    names[-1].append("head")
    stages = tuple(Stage(coordinate=number, blocks=tuple(blocks)) for number, blocks in enumerate(names))
    fields = {"microbatch": 1, "num_microbatches": 4, "global_batch": 4, **changes}
    return Plan(mesh=Mesh(pp=len(counts)), stages=stages, **fields)


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({"dp": 16}, "parameters, gradients and optimizer state on every one"),
        ({"dp": 16, "zero": 1}, "optimizer state sharded over 16 (ZeRO 1)"),
        ({"dp": 16, "zero": 3}, "optimizer state, gradients and parameters sharded over 16 (ZeRO 3)"),
        (
            {"dp": 16, "zero": 2, "hybrid": 8},
            "optimizer state and gradients sharded in groups of 8 inside each host (hybrid ZeRO 2)",
        ),
        ({"dp": 4, "cp": 4, "zero": 1}, "optimizer state sharded over 16 (ZeRO 1)"),
    ],
)
def test_state(request_fields: dict[str, Any], words: str) -> None:
    assert state_words(plan_for(GRAPH, **request_fields), named_machine(8, 2)) == words


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ((), "nothing is recomputed"),
        ((Recompute(mode="full", blocks=("blocks.0-47",)),), "full recompute of all blocks"),
        (
            (Recompute(mode="full", blocks=("blocks.0-46/2",)),),
            "full recompute of blocks.0-46/2; 24 blocks keep everything",
        ),
        (
            (Recompute(mode="selective", blocks=("blocks.0-23",)), Recompute(mode="full", blocks=("blocks.24-47",))),
            "selective recompute of blocks.0-23; full recompute of blocks.24-47",
        ),
    ],
)
def test_recompute(rules: tuple[Recompute, ...], words: str) -> None:
    assert recompute_words(flat_plan(GRAPH, recompute=rules), GRAPH) == words


def test_batch_and_offload_and_numbers() -> None:
    assert batch_words(flat_plan(GRAPH)) == "1 microbatch of 1 sample: global batch 1"
    plan = flat_plan(
        GRAPH,
        2,
        microbatch=2,
        num_microbatches=1024,
        compile=True,
        offload=Offload(what="optimizer", share=0.5, delayed=True),
    )
    assert batch_words(plan) == "1,024 microbatches of 2 samples on each data-parallel rank: global batch 4,096"
    words = plan_in_words(plan, named_machine(8))
    assert "50% of optimizer state in the hosts' memory, updated one step late" in words
    assert words[-1] == "computes in fp32, blocks compiled"


def test_experts_context_and_virtual_stages() -> None:
    words = words_of(8, dp=4, ep=2, cp=2, pp=2, virtual=4, schedule="interleaved", global_batch=32, microbatch=1)
    assert words[0] == "2-way context parallel inside each host, tokens exchanged for heads"
    assert words[1].startswith("4-way data parallel inside each host; ")
    assert words[2] == "experts 2-way parallel inside each host"
    assert words[3] == "8 pipeline stages of 6 blocks, 4 on each of 2 ranks, across hosts; schedule interleaved 1F1B"


@quick
@given(plans())
def test_every_plan_has_words(plan: Plan) -> None:
    sentences = plan_in_words(plan, named_machine(8, 64))
    assert sentences
    assert all(sentence == sentence.strip() for sentence in sentences)


# One screen


UNPROVEN = Claim(gap=0.013)


def full_result(num_runners_up: int = 9, claim: Claim = UNPROVEN) -> tuple[SearchResult, Cluster]:
    """A result in which every part of time and memory is there."""
    cluster = named_machine(8, 8)
    plan = plan_for(
        GRAPH, tp=8, pp=4, dp=2, microbatch=1, global_batch=32, zero=1, recompute="every:2", offload="optimizer"
    )
    found = estimate(chain_graph(48), flat_plan(GRAPH), machine(8))
    time = TimeParts(**{name: 0.1 + number for number, name in enumerate(TimeParts.__struct_fields__)})
    memory = MemoryParts(**{name: 2**30 + number for number, name in enumerate(MemoryParts.__struct_fields__)})
    found = msgspec.structs.replace(
        found, time_seconds=time, step_seconds=time.total, memory_bytes=memory, peak_bytes=memory.total, host_bytes=2**33,
        reserved_bytes=memory.total + 2**28, context_bytes=2**30, budget_bytes=2**34, fits=True,
        worst_moment="backward of blocks.3",
    )  # fmt: skip
    other = plan_for(GRAPH, tp=4, pp=8, dp=2, microbatch=1, global_batch=32, zero=1)
    lost = [
        RunnerUp(
            plan=other, step_seconds=50.0, peak_bytes=1, reason=f"+11 % bubble at 16 microbatches, number {number}"
        )
        for number in range(num_runners_up)
    ]
    result = SearchResult(
        plan=plan,
        estimate=found,
        runners_up=tuple(lost),
        num_candidates=1234,
        search_seconds=3.2,
        claim=claim,
        num_costed=56,
        remark="pp 8 is 1% faster, and more complicated: --prefer-fastest takes it",
    )
    return result, cluster


def test_all_of_it_fits_one_screen() -> None:
    result, cluster = full_result()
    text = shown(plan_view(result, cluster, GRAPH))
    assert len(text.splitlines()) <= 40
    assert all(len(line) <= 100 for line in text.splitlines())
    for words in (*TIME_WORDS.values(), *MEMORY_WORDS.values(), "allocator's slack", "held by the driver"):
        assert words in text
    for number in range(5):
        (line,) = (line for line in text.splitlines() if f"number {number}" in line)
        assert "tp 4 · pp 8" in line
    assert "number 5" not in text
    assert "(4 more with --json)" in text
    assert "1,234 candidates, 56 costed in 3.20 s by search joint; no plan is more than 1.3% faster by these" in text
    assert "cannot run" not in text, "all of it can"
    assert "--prefer-fastest takes it" in text


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (Claim(), "; a faster plan may exist"),
        (Claim(complete=True, gap=0.0), "; no plan is faster by these estimates"),
        (
            Claim(gap=0.0, left_out=("gpipe", "17 devices")),
            "; no plan that was searched is faster by these estimates; not",
        ),
        (Claim(gap=0.0, left_out=("gpipe", "17 devices")), "not searched: gpipe, 17 devices"),
        (Claim(gap=0.021), "; no plan is more than 2.1% faster by these estimates"),
    ],
)
def test_what_is_claimed_is_what_was_proven(claim: Claim, words: str) -> None:
    result, cluster = full_result(claim=claim)
    assert words in " ".join(shown(plan_view(result, cluster)).split())


def test_a_reason_is_shown_whole_before_the_plan_it_is_about() -> None:
    result, cluster = full_result(1)
    for length in (20, 60):
        other = msgspec.structs.replace(result.runners_up[0], reason="r" * length)
        text = shown(plan_view(msgspec.structs.replace(result, runners_up=(other,)), cluster, GRAPH))
        assert "r" * length in text
        assert ("no recompute · no offload" in text) == (length == 20)


def test_idle_devices_are_named() -> None:
    plan = flat_plan(GRAPH, 4, microbatch=2)
    found = estimate(GRAPH, plan, machine(8))
    result = SearchResult(plan=plan, estimate=found, runners_up=(), num_candidates=1, search_seconds=0.1)
    text = shown(plan_view(result, machine(8), GRAPH))
    assert "uses 4 of 8 devices" in text
    assert "runners-up" not in text


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, ""), (0.5, "█████"), (1.0, "█" * 10), (2.0, "█" * 10), (0.0125, "▏")]
)
def test_bars(share: float, drawn: str) -> None:
    assert bar(share) == drawn


# Differences


@quick
@given(plans())
def test_a_plan_does_not_differ_from_itself(plan: Plan) -> None:
    assert plan_differences(plan, plan) == ()
    assert difference_words(plan, plan) == "the same plan"


@pytest.mark.parametrize(
    ("changes", "part", "words"),
    [
        ({"zero": 2}, "ZeRO", "ZeRO 2"),
        ({"microbatch": 4}, "microbatch", "microbatch 4"),
        ({"recompute": "full"}, "recompute", "recompute full (48 blocks)"),
        ({"precision": "bf16"}, "precision", "bf16"),
        ({"compile": True}, "compile", "compiled"),
        ({"offload": "optimizer"}, "offload", "offload optimizer"),
        ({"tp": 2, "dp": 4}, "tp", "tp 2"),
        ({"dp": 4, "global_batch": 32}, "dp", "dp 4 · batch 32"),
        ({"zero": 1, "hybrid": 2}, "sharding group", "ZeRO 1 · groups of 2"),
    ],
)
def test_each_part_can_differ(changes: dict[str, Any], part: str, words: str) -> None:
    plain: dict[str, Any] = {"dp": 8, "microbatch": 2, "global_batch": 64}
    one, other = plan_for(GRAPH, **plain), plan_for(GRAPH, **{**plain, **changes})
    found = {difference.part: difference for difference in plan_differences(one, other)}
    assert part in found
    assert difference_words(other, one) == words
    back = {difference.part: difference for difference in plan_differences(other, one)}
    assert (back[part].first, back[part].second) == (found[part].second, found[part].first)
    assert found[part].second in shown(differences_table(tuple(found.values()), ("a", "b"))).replace("\n", " ")


def test_stages_that_are_cut_otherwise() -> None:
    one, other = staged((12, 12, 12, 12)), staged((11, 13, 13, 11))
    (difference,) = plan_differences(one, other)
    assert (difference.part, difference.second) == ("stages", "11, 13, 13, 11 blocks")
    assert difference_words(other, one) == "other stages"


def test_what_a_difference_costs() -> None:
    """Full recompute of a chain: a third more time, nothing else slower."""
    cluster = machine(1)
    plain, again = (estimate(GRAPH, flat_plan(GRAPH, microbatch=8, recompute=mode), cluster) for mode in ((), "full"))
    changes = {change.figure: change for change in estimate_changes(plain, again)}
    assert changes["time_seconds.recompute"].second == pytest.approx(again.step_seconds - plain.step_seconds, rel=1e-6)
    assert "time_seconds.forward" not in changes
    assert changes["memory_bytes.activations"].second < changes["memory_bytes.activations"].first
    assert verdict(plain, again, ("a", "b")) == "a is 1.33 × as fast as b"
    assert verdict(again, plain, ("a", "b")) == "b is 1.33 × as fast as a"
    assert verdict(plain, plain, ("a", "b")) == "both take the same time"
    text = shown(changes_table(plain, again, ("a", "b")))
    assert "recompute" in text
    assert "forward" not in text


# Nothing fits


def test_a_way_out_in_words() -> None:
    plan = flat_plan(GRAPH)
    found = msgspec.structs.replace(estimate(GRAPH, plan, machine(8)), budget_bytes=2**30, fits=True)
    way = WayOut(
        words="selective recompute of blocks.0-23", plan=plan, estimate=found, num_hosts=1, saved_bytes=round(9.4 * 2**30),
        slower_share=0.06,
    )  # fmt: skip
    assert way_words(way, machine(8)).startswith(
        "selective recompute of blocks.0-23 saves 9.40 GiB per device for +6% time ("
    )
    more = msgspec.structs.replace(
        way, words="2 more hosts, with dp 3", num_hosts=3, slower_share=-0.5, leave_out=("--dp",)
    )
    assert "saves 9.40 GiB per device, with 50% less time (" in way_words(more, machine(8))
    assert ", --hosts 3; " in way_words(more, machine(8))
    assert way_words(more, machine(8)).endswith("; leave out --dp")
    later = msgspec.structs.replace(way, not_yet=("offload of optimizer",))
    assert way_words(later, machine(8)).endswith("; this version cannot run offload of optimizer yet")


def test_the_view_of_nothing_fits_names_all_three() -> None:
    plan = flat_plan(GRAPH)
    found = estimate(GRAPH, plan, machine(8), budget_bytes=1024)
    miss = Infeasible(plan=plan, estimate=found, binding="memory of rank 0: too much", num_candidates=7)
    text = shown(infeasible_view(miss, machine(8)))
    assert "of 7 candidates this one comes nearest" in text
    assert "what binds: memory of rank 0: too much" in text
    assert "no change of it that was tried needs less" in text
    way = WayOut(words="ZeRO 3", plan=plan, estimate=found, num_hosts=1, saved_bytes=5, slower_share=0.0)
    text = shown(infeasible_view(msgspec.structs.replace(miss, ways_out=(way,)), machine(8)))
    assert "not enough, but the nearest way out" in text
