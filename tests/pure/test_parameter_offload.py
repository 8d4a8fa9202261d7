"""The cost of parameter offload: device memory does not grow with depth; compute hides the traffic or does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machines import captured_in, flat_plan, machine
from transformer import transformer_graph

from meshwright.core.cluster import Cluster, Link
from meshwright.core.estimate import Estimate
from meshwright.core.graph import Graph
from meshwright.core.plan import Offload
from meshwright.core.recipe import Recipe, TrainingSystem
from meshwright.cost.estimate import estimate

LAYERS, HIDDEN, SEQ = 8, 64, 32
RECIPE = Recipe(optimizer_scalar_bytes=0)


def model(layers: int) -> Graph:
    return captured_in("fp32", transformer_graph(layers=layers, hidden=HIDDEN, heads=4, seq=SEQ))


def hosted(link: float = 1e12, updates: float = 1e12) -> Cluster:
    return msgspec.structs.replace(
        machine(1),
        host_link=Link(bytes_per_second=link, origin="assumed"),
        host_updates_per_second=updates,
    )


def cost(
    layers: int = LAYERS, num_microbatches: int = 1, cluster: Cluster | None = None, samples: int = 1, **offload: Any
) -> Estimate:
    graph = model(layers)
    moved = Offload(what="parameters", **offload)
    plan = flat_plan(graph, recompute="full", offload=moved, num_microbatches=num_microbatches, microbatch=samples)
    return estimate(graph, plan, cluster or hosted(), RECIPE)


def block_elements() -> int:
    graph = model(2)
    return sum(one.num_elements for one in graph.parameters if one.block == graph.repeated_blocks[0])


def test_with_a_stash_on_the_host_memory_is_the_same_at_every_depth() -> None:
    shallow, deep = cost(4, stash="host"), cost(64, stash="host")
    assert shallow.peak_bytes == deep.peak_bytes
    assert deep.host_bytes > 10 * shallow.host_bytes


def test_a_stash_on_the_device_grows_by_the_inputs_of_the_blocks() -> None:
    shallow, deep = cost(4, samples=512), cost(8, samples=512)
    graph = model(4)
    kind = graph.kind_by_block[graph.repeated_blocks[0]]
    handed_on = next(one.output_bytes.at(512) for one in kind.passes if one.phase == "forward")
    assert deep.peak_bytes - shallow.peak_bytes == pytest.approx(4 * handed_on)


def test_the_window_and_the_lanes() -> None:
    narrow, wide = cost(stash="host").memory_bytes, cost(stash="host", window=5).memory_bytes
    assert narrow.gathered_parameters == 2 * 4 * block_elements()
    assert wide.gathered_parameters == 5 * 4 * block_elements()
    assert narrow.communication_buffers == 2 * 4 * block_elements()


def test_the_host_holds_parameters_moments_and_a_few_gradients() -> None:
    expected = LAYERS * block_elements() * (4 + 8) + 5 * 4 * block_elements()
    assert cost().host_bytes == expected


def test_a_step_waits_until_its_state_is_on_the_disk() -> None:
    on_host = cost()
    state = 3 * 4 * LAYERS * block_elements()
    times = []
    for rate in (1e12, 1e6, 5e5):
        cluster = msgspec.structs.replace(hosted(), disk_bytes_per_second=rate)
        found = cost(where="disk", folder="/somewhere", cluster=cluster)
        waited = found.time_seconds.update - on_host.time_seconds.update
        assert waited == pytest.approx(state / rate, rel=1e-6)
        times.append(found.step_seconds)
    assert times == sorted(times)
    assert times[2] - times[1] >= state / 1e6
    assumed = cost(where="disk", folder="/somewhere")
    assert assumed.time_seconds.update - on_host.time_seconds.update == pytest.approx(state / 1e9, rel=1e-6)


def test_on_disk_the_host_holds_the_state_of_three_blocks() -> None:
    found = cost(where="disk", folder="/somewhere").host_bytes
    assert found == LAYERS * block_elements() * 4 + 3 * (1 + 2) * 4 * block_elements() + 5 * 4 * block_elements()


def test_a_block_crosses_twice_a_step_however_many_microbatches() -> None:
    slow = hosted(link=1e5)
    one, four = cost(cluster=slow), cost(cluster=slow, num_microbatches=4)
    traffic = (LAYERS * block_elements() * 4) / 1e5
    for found in (one, four):
        parts = found.time_seconds
        compute = parts.forward_total + parts.backward_total
        assert parts.transfer == pytest.approx(2 * traffic - compute, rel=1e-6)


def test_a_fast_link_and_host_leave_compute_alone() -> None:
    graph = model(LAYERS)
    whole = msgspec.structs.replace(
        RECIPE, system=TrainingSystem(whole_recompute=True)
    )  # a streamed block runs again to its end
    plain = estimate(graph, flat_plan(graph, recompute="full"), hosted(), whole).time_seconds
    found = cost().time_seconds
    assert found.transfer == 0
    assert found.forward == plain.forward
    assert found.backward == plain.backward
    assert found.recompute == plain.recompute > 0


def test_a_slow_host_shows_what_backward_is_too_short_for() -> None:
    found = cost(cluster=hosted(updates=1e4)).time_seconds
    update = LAYERS * block_elements() / 1e4
    assert found.update == pytest.approx(update - found.backward_total, rel=1e-6)


def test_inputs_that_go_to_the_host_cross_the_link() -> None:
    slow = hosted(link=1e5)
    assert cost(cluster=slow, stash="host").time_seconds.transfer > cost(cluster=slow).time_seconds.transfer


# ------------------------------------------------------------ activations


def away(num_blocks: int, link: float = 1e12) -> Estimate:
    graph = model(LAYERS)
    names = graph.repeated_blocks[:num_blocks]
    return estimate(graph, flat_plan(graph, microbatch=512, offload=Offload(activations=names)), hosted(link), RECIPE)


def test_activations_of_a_block_move_to_the_host() -> None:
    none, some, more = away(0), away(3), away(6)
    assert none.host_bytes == 0
    assert more.host_bytes == 2 * some.host_bytes
    assert none.memory_bytes.activations - some.memory_bytes.activations == pytest.approx(some.host_bytes, rel=0.01)


def test_they_cost_no_second_forward_and_what_the_link_takes_beyond_compute() -> None:
    none, hidden, slow = away(0).time_seconds, away(6).time_seconds, away(6, link=1e3).time_seconds
    assert hidden.recompute == hidden.transfer == 0
    assert hidden.backward == none.backward
    moved = 2 * away(6).host_bytes / 1e3
    assert slow.transfer == pytest.approx(moved - slow.forward_total - slow.backward_total, rel=1e-6)
