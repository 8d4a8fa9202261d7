"""State on the host: what leaves the device, and what the traffic costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import captured_in, chain_graph, flat_plan, machine
from strategies import quick

from meshwright.core.cluster import Cluster, Link
from meshwright.core.errors import InputError
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Offload
from meshwright.core.recipe import Recipe
from meshwright.cost.estimate import estimate

GRAPH = chain_graph(4, (64, 1000))
PSI = 4 * 64 * 1000
RECIPE = Recipe(optimizer_scalar_bytes=0)


def hosted(num_devices: int = 1, link: float = 1e6, updates: float | None = 1e6, **device: Any) -> Cluster:
    return msgspec.structs.replace(
        machine(num_devices, **device),
        host_link=Link(bytes_per_second=link, origin="assumed"),
        host_updates_per_second=updates,
    )


def cost(what: Any = "none", cluster: Cluster | None = None, dp: int = 1, zero: int = 0, **fields: Any) -> Estimate:
    changes = {key: fields.pop(key) for key in ("microbatch", "num_microbatches") if key in fields}
    plan = flat_plan(GRAPH, dp, zero=zero, offload=Offload(what=what, **fields), **changes)
    return estimate(GRAPH, plan, cluster or hosted(dp), RECIPE)


# Memory


def test_the_optimizers_state_moves_to_the_host() -> None:
    plain, moved = cost(), cost("optimizer")
    assert plain.host_bytes == 0
    assert moved.memory_bytes.optimizer_state == 0
    assert moved.host_bytes == 16 * PSI, "two moments, the parameter they are of, and a gradient on its way"
    assert moved.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_share_of_it(share: float) -> None:
    plain, moved = cost(), cost("optimizer", share=share)
    assert moved.memory_bytes.optimizer_state == (1 - share) * 8 * PSI
    assert moved.host_bytes == share * 16 * PSI
    assert plain.memory_bytes.parameters == moved.memory_bytes.parameters


def test_moments_in_16_bits() -> None:
    """Of what is on the host; what stays on the device keeps them in 32."""
    assert cost("optimizer", moments="bf16").host_bytes == 12 * PSI
    shared = cost("optimizer", moments="bf16", share=0.5)
    assert shared.host_bytes == 0.5 * 12 * PSI
    assert shared.memory_bytes.optimizer_state == 0.5 * 8 * PSI


def test_on_disk_only_what_crosses_the_link_takes_memory() -> None:
    found = cost("optimizer", where="disk", folder="/somewhere")
    assert found.host_bytes == 8 * PSI, "the parameter, which the device has the same way, and a gradient on its way"
    narrow = cost("optimizer", where="disk", folder="/somewhere", moments="bf16")
    rates = [msgspec.structs.replace(hosted(updates=1e12), disk_bytes_per_second=rate) for rate in (1e4, 2e4)]
    slow, fast = (cost("optimizer", where="disk", folder="/somewhere", cluster=one) for one in rates)
    assert slow.step_seconds - fast.step_seconds == pytest.approx(2 * 8 * PSI * (1 / 1e4 - 1 / 2e4), rel=0.01)
    assert narrow.host_bytes == found.host_bytes


def test_parameters_are_there_two_blocks_at_a_time() -> None:
    moved = cost("parameters")
    assert moved.memory_bytes.parameters == moved.memory_bytes.optimizer_state == 0
    assert moved.memory_bytes.gathered_parameters <= 2 * 4 * PSI // 4
    assert moved.memory_bytes.gradients <= 4 * PSI // 4
    assert moved.host_bytes == 16 * PSI


def test_depth_does_not_need_device_memory_when_parameters_are_streamed() -> None:
    """L2L: what the device holds of the state is the same for 4 and 16 blocks."""
    held = []
    for num_blocks in (4, 16):
        graph = chain_graph(num_blocks, (64, 1000))
        plan = flat_plan(graph, offload=Offload(what="parameters"), recompute="full")
        parts = estimate(graph, plan, hosted(), RECIPE).memory_bytes
        held.append(parts.total - parts.activations)
    assert held[0] == held[1]


def test_ranks_of_a_host_add_up_and_zero_shares_them() -> None:
    whole, shared = cost("optimizer", dp=4), cost("optimizer", dp=4, zero=2)
    assert whole.host_bytes == 4 * 16 * PSI
    assert shared.host_bytes == 16 * PSI


def test_on_a_cpu_the_host_is_the_device() -> None:
    found = cost("optimizer", hosted(kind="cpu"))
    assert found.host_bytes == found.peak_bytes


# Time


def test_gradients_leave_as_they_are_made_and_the_next_forward_begins_where_parameters_are_back() -> None:
    """By hand: the first gradient is a block's backward away; the link, slower than the host, is busy for 4 Ψ / link; then the
    blocks that backward reached first, their share backward / busy, still have their forward to run."""
    found = cost("optimizer", hosted(link=1e6, updates=1e6)).time_seconds
    forward, backward, busy = found.forward, found.backward, 4 * PSI / 1e6
    shown = backward / 4 + busy + forward * backward / busy - forward - backward
    assert found.transfer == pytest.approx(shown)
    assert found.update == 0, "nothing is left on the device"


def test_a_slow_host_shows_and_copies_take_of_its_memory() -> None:
    found = cost("optimizer", hosted(link=1e12, updates=1e4)).time_seconds
    busy = PSI / 1e4 * (1 + 2 * 4 / 28)
    assert found.transfer == pytest.approx(busy, rel=1e-2)


def test_what_backward_hides_does_not_show() -> None:
    found = cost("optimizer", hosted(link=1e12, updates=1e12))
    plain = cost()
    assert found.step_seconds <= plain.step_seconds


def test_clipping_waits_for_all_gradients() -> None:
    """By hand: updates begin when backward ends, and move 36 bytes an element, since no gradient is fresh. Without clipping those
    that a forward and a backward have time for move 24."""
    plan = flat_plan(GRAPH, offload=Offload(what="optimizer"))
    cluster = hosted(link=1e12, updates=1e6)
    prompt, clipped = (
        estimate(GRAPH, plan, cluster, msgspec.structs.replace(RECIPE, clips=clips)) for clips in (False, True)
    )
    forward, backward = prompt.time_seconds.forward, prompt.time_seconds.backward
    waited, fresh = (PSI / 1e6 * moved / 28 for moved in (36, 24))
    share = (forward + backward) / fresh
    busy = share * fresh + (1 - share) * waited
    assert prompt.time_seconds.transfer == pytest.approx(
        backward / 4 + busy + forward * backward / busy - forward - backward
    )
    assert clipped.time_seconds.transfer == pytest.approx(waited - forward + forward / 4)
    assert clipped.step_seconds > prompt.step_seconds


def test_a_delayed_update_hides_under_the_next_step() -> None:
    prompt, late = (cost("optimizer", hosted(link=1e9, updates=1e9), delayed=delayed) for delayed in (False, True))
    assert late.time_seconds.update == 0
    assert late.step_seconds <= prompt.step_seconds
    very_slow = cost("optimizer", hosted(link=1e6, updates=1e3), delayed=True)
    assert very_slow.time_seconds.transfer > 0, "what is longer than a step shows"


def test_streamed_parameters_come_in_twice_a_microbatch() -> None:
    found = cost("parameters", hosted(link=1e6), num_microbatches=3).time_seconds
    compute = found.forward + found.backward
    assert found.transfer == pytest.approx(3 * 3 * 4 * PSI / 1e6 - compute)


def test_ranks_share_the_hosts_cores() -> None:
    slow = hosted(4, link=1e12, updates=1e3)
    whole, sharded = (cost("optimizer", slow, dp=4, zero=zero).time_seconds.update for zero in (0, 1))
    assert whole == pytest.approx(4 * sharded)


@pytest.mark.parametrize(("kind", "fused", "moved"), [("cuda", True, 28), ("cuda", False, 40), ("cpu", True, 40)])
def test_gradients_are_widened_in_the_pass_that_updates_where_there_is_a_kernel_for_it(
    kind: str, fused: bool, moved: int
) -> None:
    graph = captured_in("bf16", GRAPH)
    plan = flat_plan(graph, offload=Offload(what="optimizer", share=0.0))
    assert plan.stores_16_bits
    cluster = hosted(kind=kind, update_elements_per_second=1e6)
    found = estimate(graph, plan, cluster, msgspec.structs.replace(RECIPE, fused_update=fused))
    assert found.time_seconds.update == pytest.approx(PSI / 1e6 * moved / 28)


def test_a_share_of_nothing_is_no_offload() -> None:
    plain, moved = cost(), cost("optimizer", share=0.0)
    assert moved.time_seconds == plain.time_seconds
    assert moved.host_bytes == plain.host_bytes == 0


@quick
@given(st.sampled_from(["optimizer", "parameters"]), st.floats(1e4, 1e10), st.floats(1e4, 1e10), st.booleans())
def test_a_faster_link_to_the_host_is_never_slower(what: str, one: float, other: float, delayed: bool) -> None:
    slow, fast = (cost(what, hosted(link=speed), delayed=delayed).step_seconds for speed in sorted((one, other)))
    assert fast <= slow


def test_a_link_without_a_figure_is_refused() -> None:
    with pytest.raises(InputError, match="'machine' has no figure for the link between device and host, which offload"):
        cost("optimizer", machine(1))
