"""The cost of offload: of optimizer state, with its updates on the host (runtime/offload/optimizer.py), and of activations.

    n, n_h        elements this rank updates, and the elements whose state is on the host (rules/groups.py)
    D, M          bytes of an element as the device computes with it, and as the host updates it
    F, B          forward of a step, and backward of its last microbatch
    U             seconds the host needs for its updates: n_h / rate, in proportion to the bytes of memory an element moves there.
                  M and both moments are always read and written. A gradient that is updated when it arrives, and the parameter
                  that is sent back at once, are taken to be in the processor's cache; otherwise they go through memory four
                  times                                                                            -> _Host

    host memory   n_h (M master + slots · M state + D for a gradient on its way, twice where updates may be late
                  + M for a sum where there are microbatches)
    on disk       state is in a file. Host memory holds gradients in transfer, and the master weights where the device computes
                  with the same numbers. U is at least the time to read and write the state               -> _Host
    one rank, U > B   gradients arrive while backward runs, in its order. When backward ends, the updates of the first blocks are
                      left; they run in the order forward needs them, and the last blocks' forward runs after the last update:
                          step = last gradient's delay + U + F · B / U                                   -> _early
    one rank, U ≤ B   only the updates of the blocks that backward reaches last are exposed
    clipping          updates begin when backward ends:  step = B + max(U, F) and the last block's forward
    slow link         where copies out or back take longer than the updates, their time takes the place of U
    delayed           step = max(F + B, U)
    several ranks     updates begin when gradients are reduced; none of their time is hidden
    on a CPU          device and host are the same cores: compute waits for all work of the host. Updates are exposed in full, and
                      so is the handling of each tensor that leaves, is updated and returns: one latency of the link for every two
                      times that one thread wakes another. Only the sleep of a throttled link is hidden     -> _on_same_cores

    activations       of one microbatch, what forward of the offloaded blocks kept, less their outputs: it leaves during forward and
                      comes back during backward (runtime/offload/activations.py)                    -> exposed_activation_seconds

Parameter offload streams the parameters: cost/parameter_offload.py. A plan with parameter offload that cannot run is costed by
its traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.links import host_link
from meshwright.cost.compute.optimizer_update import update_seconds
from meshwright.cost.memory.local_parameters import moment_bytes
from meshwright.cost.memory.rank_state import RankState
from meshwright.cost.timing import StageSeconds

ASSUMED_HOST_UPDATES_PER_SECOND = 1.0e9
"""Parameters per second that AdamW updates on a host that was not measured. Origin: assumed."""
ASSUMED_DISK_BYTES_PER_SECOND = 1.0e9
"""Rate of a host's disk that was not measured. Origin: assumed."""
WAKES, CLIP_WAKES = 4, 2
"""Times one thread wakes another for a tensor: it leaves, has arrived, is updated, is back; for the norm, twice more."""
UPDATE_BYTES = 28
"""Bytes of memory that AdamW's update moves for each parameter: four reads and three writes of it and its state."""
FRESH_BYTES = 24
"""The same for a gradient that has just arrived, taken to be in a cache that devices write into. Origin: a count of bytes that
explained one step on an H200's host (1,097 ms); it predicted two other steps to 4 % (1,096 and 1,221 ms). A step whose gradients
wait for the next step took 12 % longer than predicted."""
WIDENING_BYTES = 12
"""A 16-bit gradient read and written in 32, a 32-bit parameter read and written in 16."""


@dataclass(frozen=True)
class Offloaded:
    transfer_seconds: float
    update_seconds: float
    """Seconds of the updates, on device and host together."""


def offloaded(
    rank_state: RankState,
    plan: Plan,
    cluster: Cluster,
    recipe: Recipe,
    stages: Sequence[StageSeconds],
    played_seconds: float,
) -> Offloaded:
    if plan.offload.what == "parameters":
        return _by_traffic(rank_state, plan, cluster, played_seconds)
    host = _Host(rank_state, plan, cluster)
    device_update = _device_update_seconds(rank_state.trainable - rank_state.shipped, plan, cluster, recipe)
    forward = plan.num_microbatches * sum(stage.forward_seconds for stage in stages) / plan.mesh.pp
    backward = sum(stage.backward_seconds for stage in stages) / plan.mesh.pp
    if cluster.device.kind == "cpu":
        return _on_same_cores(host, plan, recipe, forward, backward, device_update)
    if plan.offload.delayed:
        return Offloaded(max(0.0, host.update - played_seconds), device_update)
    if plan.world > 1 or plan.precision == "fp16":
        return Offloaded(0.0, max(host.out, host.update, host.back) + device_update)
    if recipe.clips:
        waiting = max(host.out - backward, 0.0) + max(host.update, host.back) - forward
        return Offloaded(max(waiting, 0.0) + forward / max(len(plan.blocks), 1), device_update)
    passes = sum(stage.forward_seconds + stage.backward_seconds - stage.recompute for stage in stages) / plan.mesh.pp
    return Offloaded(_early(host, forward, backward, host.early_update(passes), len(plan.blocks)), device_update)


def _device_update_seconds(num_elements: float, plan: Plan, cluster: Cluster, recipe: Recipe) -> float:
    """Updates of the parameters whose state stays on the device. With 16-bit parameters, a GPU widens gradients and narrows the
    new parameters in the pass that updates them; without a fused kernel, each of these is a pass of its own."""
    update = update_seconds(num_elements, cluster.device)
    is_one_pass = cluster.device.kind != "cpu" and recipe.fused_update
    if not plan.stores_16_bits or is_one_pass:
        return update
    return update * (1 + WIDENING_BYTES / UPDATE_BYTES)


def _on_same_cores(
    host: _Host, plan: Plan, recipe: Recipe, forward: float, backward: float, device_update: float
) -> Offloaded:
    """Host and device are the same cores: only the link's time overlaps with compute."""
    wakes = WAKES + (CLIP_WAKES if recipe.clips else 0)
    handling = host.num_tensors * host.latency * wakes / 2
    out, back = (seconds + host.num_tensors * host.latency for seconds in (host.out, host.back))
    if plan.offload.delayed:
        waiting = max(0.0, max(out, back) - forward - backward)
    elif plan.world > 1 or plan.precision == "fp16":
        waiting = out + back
    else:
        waiting = max(0.0, out - backward) + max(0.0, back - forward) + min(back, forward) / max(len(plan.blocks), 1)
    return Offloaded(waiting + handling, host.update + device_update)


def _early(host: _Host, forward: float, backward: float, update: float, num_blocks: int) -> float:
    """Exposed seconds of the updates of one rank whose gradients are copied to the host while backward makes them."""
    first_gradient = backward / max(num_blocks, 1)
    update = max(update, host.out, host.back)
    if update <= backward:
        return min(host.largest_piece, update)
    return max(0.0, first_gradient + update + forward * backward / update - forward - backward)


def exposed_activation_seconds(num_bytes: float, cluster: Cluster, stages: Sequence[StageSeconds]) -> float:
    """Seconds of one microbatch's transfers that its forward and backward do not hide."""
    seconds = num_bytes / host_link(cluster, "offload of activations").bytes_per_second
    forward = sum(stage.forward_seconds for stage in stages)
    backward = sum(stage.backward_seconds for stage in stages)
    return max(0.0, seconds - forward) + max(0.0, seconds - backward)


def host_update_rate(plan: Plan, cluster: Cluster) -> float:
    """Parameters a second that the host updates for one of its ranks."""
    rate = cluster.host_updates_per_second or ASSUMED_HOST_UPDATES_PER_SECOND
    return rate / min(plan.world, cluster.devices_per_host)


def disk_rate(plan: Plan, cluster: Cluster) -> float:
    """Bytes a second that one rank writes to its host's disk, or reads from it."""
    rate = cluster.disk_bytes_per_second or ASSUMED_DISK_BYTES_PER_SECOND
    return rate / min(plan.world, cluster.devices_per_host)


class _Host:
    """Seconds of the host's work for one rank in a step."""

    def __init__(self, rank_state: RankState, plan: Plan, cluster: Cluster) -> None:
        found = host_link(cluster, "offload")
        link = found.bytes_per_second
        rate = host_update_rate(plan, cluster)
        moved = rank_state.shipped * rank_state.items.gradient
        self.out = moved * plan.num_microbatches / link
        self.back = moved / link
        shared = 1 + 2 * rank_state.items.gradient / UPDATE_BYTES
        disk = 0.0
        if plan.offload.where == "disk":  # every update reads its state from the disk, and the state is written back
            narrower = rank_state.recipe.optimizer_slots * (plan.master_bytes - moment_bytes(plan))
            disk = 2 * rank_state.shipped * (rank_state.items.state - narrower) / disk_rate(plan, cluster)
        self.update = max(rank_state.shipped / rate * shared, disk)
        """Seconds of the updates when all gradients have waited in memory."""
        self._fresh_update = max(rank_state.shipped / rate * FRESH_BYTES / UPDATE_BYTES, disk)
        blocks = max(len(plan.blocks), 1)
        self.latency = found.latency_seconds or 0.0
        self.num_tensors = rank_state.num_shipped
        self.largest_piece = (rank_state.shipped / rate + moved / link) / blocks

    def early_update(self, passes: float) -> float:
        """Seconds of the updates when gradients arrive while backward makes them: gradients the host keeps up with are fresh.

        passes: seconds of a forward and a backward without recompute, so that more recompute makes no update faster.
        """
        fresh = min(1.0, passes / self._fresh_update) if self._fresh_update else 1.0
        return fresh * self._fresh_update + (1 - fresh) * self.update


def _by_traffic(rank_state: RankState, plan: Plan, cluster: Cluster, played_seconds: float) -> Offloaded:
    """Parameter offload by its traffic: parameters come in before each forward and each backward, and gradients go out."""
    link, share = host_link(cluster, "offload").bytes_per_second, plan.offload.share
    out = rank_state.sharded_gradients * share / link
    back = rank_state.parameter_bytes * share / link
    rate = host_update_rate(plan, cluster)
    traffic = plan.num_microbatches * (2 * back + out)
    device_update = update_seconds(rank_state.trainable * (1 - share), cluster.device)
    return Offloaded(max(0.0, traffic - played_seconds), max(rank_state.trainable * share / rate, device_update))
