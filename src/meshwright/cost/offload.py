"""What keeping state on the host costs in time.

optimizer    gradients go to the host while backward runs, the host updates its share, parameters come back:
                 exposed = max(0, out - backward) + update on the host + back
             the device updates the rest meanwhile
             delayed: all of it runs under the next step, and only what is longer than a step shows
parameters   each block's parameters come in before its forward and before its backward, two blocks ahead, and gradients
             go out; what compute does not hide shows: max(0, traffic of a microbatch - its compute) · microbatches,
             and the update on the host as above
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.cluster import Cluster
from meshwright.core.errors import InputError
from meshwright.core.plan import Plan
from meshwright.cost.compute import update_seconds
from meshwright.cost.holdings import Holdings
from meshwright.cost.stages import StageCost

ASSUMED_HOST_UPDATES_PER_SECOND = 1.0e9
"""Parameters per second that AdamW updates on one host where nobody measured it. Origin: assumed."""


@dataclass(frozen=True)
class Offloaded:
    transfer_seconds: float = 0.0
    update_seconds: float | None = None
    """On the device and the host together; None where nothing is offloaded."""


def offloaded(
    holdings: Holdings, plan: Plan, cluster: Cluster, stages: Sequence[StageCost], played_seconds: float
) -> Offloaded:
    if plan.offload.what == "none":
        return Offloaded()
    if cluster.host_link is None:
        raise InputError(
            f"cluster '{cluster.name}' has no figure for the link between device and host, which offload needs: "
            "add host_link to its file"
        )
    link, share = cluster.host_link.bytes_per_second, plan.offload.share
    out = holdings.sharded_gradients * share / link
    back = holdings.parameter_bytes * share / link
    rate = (cluster.host_updates_per_second or ASSUMED_HOST_UPDATES_PER_SECOND) / min(
        plan.world, cluster.devices_per_host
    )
    update = holdings.trainable * share / rate
    beside = update_seconds(holdings.trainable * (1 - share), cluster.device)
    backward = plan.num_microbatches * sum(stage.backward_seconds for stage in stages) / plan.mesh.pp
    exposed = max(0.0, out - backward) + back
    if plan.offload.what == "parameters":
        traffic = plan.num_microbatches * (2 * back + out)
        exposed = max(0.0, traffic - played_seconds)
    if plan.offload.delayed:
        return Offloaded(max(0.0, exposed + update - played_seconds), beside)
    return Offloaded(exposed, max(update, beside))
