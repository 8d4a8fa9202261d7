"""Device memory that tensors cannot use: the allocator's slack, and what the driver and the communicators hold."""

from __future__ import annotations

from meshwright.core.cluster import Device
from meshwright.core.constants import Constants
from meshwright.core.plan import Mesh


def slack_and_context(mesh: Mesh, compiled: bool, constants: Constants) -> tuple[float, float]:
    """The share of a peak that the allocator reserves on top of it, and the bytes that driver and communicators hold."""
    slack = constants.compiled_slack_share if compiled else constants.allocator_slack_share
    axes = sum(degree > 1 for degree in (mesh.pp, mesh.dp, mesh.cp, mesh.tp))
    communicators = axes + (mesh.world > 1)  # one more spans all ranks
    return slack, constants.context_bytes + communicators * constants.communicator_bytes


def usable_bytes(budget_bytes: float, mesh: Mesh, compiled: bool, device: Device) -> float:
    """The largest peak of tensors that fits in a budget."""
    if device.constants is None:
        return budget_bytes
    slack, context = slack_and_context(mesh, compiled, device.constants)
    return (budget_bytes - context) / (1 + slack)
