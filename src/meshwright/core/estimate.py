"""An Estimate: what a plan is predicted to cost. A Trace has the same fields, observed."""

from __future__ import annotations

from typing import Literal

import msgspec

from meshwright.core.bounds import CountOrZero, NotNegative, Number
from meshwright.core.codec import Value
from meshwright.core.collective import Collective


class TimeParts(Value, kw_only=True):
    """Seconds of one step by part; they add up to the step.

    exposed_gather, exposed_reduce: communication that compute does not hide, asked for in forward and in backward.
    exposed_inner: communication inside the blocks (tp, cp, ep), which compute waits for.
    transfer: waiting for another stage's activations or gradients, and for copies between host and device.
    A Trace takes forward, backward and update from its plain steps, and divides each by the shares that recompute and
    waiting for communication had of it in the sampled step. Without a sampled step they stay undivided.
    """

    forward: Number = 0.0
    recompute: Number = 0.0
    backward: Number = 0.0
    exposed_gather: Number = 0.0
    exposed_reduce: Number = 0.0
    exposed_inner: Number = 0.0
    bubble: Number = 0.0
    transfer: Number = 0.0
    update: Number = 0.0
    other: Number = 0.0

    @property
    def total(self) -> float:
        return float(sum(msgspec.structs.astuple(self)))

    @property
    def forward_total(self) -> float:
        return self.forward + self.exposed_gather

    @property
    def backward_total(self) -> float:
        return self.backward + self.recompute + self.exposed_reduce


class MemoryParts(Value, kw_only=True):
    """Bytes on one device at the moment of its peak, by category; they add up to the peak."""

    parameters: CountOrZero = 0
    gradients: CountOrZero = 0
    optimizer_state: CountOrZero = 0
    activations: CountOrZero = 0
    inputs: CountOrZero = 0
    gathered_parameters: CountOrZero = 0
    communication_buffers: CountOrZero = 0
    temporaries: CountOrZero = 0

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


RatesOrigin = Literal["probe", "family", "assumed"]
"""Origin of rates: measured on the device, constants of its family, or constants of other families."""


class Estimate(Value, kw_only=True):
    """The predicted cost of a plan: seconds of a step by part, bytes of the worst device by category, and the collectives.

        found = mw.estimate(model, cluster, tp=2, global_batch=64)
        print(found.step_seconds, found.time_seconds.bubble, found.fits, found.needed_bytes)

    step_seconds, time_seconds            a step, and its parts
    peak_bytes, memory_bytes              of the worst device (`worst_rank`, `worst_moment`), and by category
    needed_bytes, budget_bytes, fits      the peak with what allocator and driver hold; what it must fit in; whether it does
    tokens_per_second, model_flops_utilisation, bubble, collectives
    error_share, rates                    how far estimates by these rates have been off, and where the rates came from
    """

    format: Literal[1] = 1
    step_seconds: NotNegative
    time_seconds: TimeParts
    peak_bytes: CountOrZero
    """Peak of the worst device."""
    memory_bytes: MemoryParts
    host_bytes: CountOrZero
    tokens_per_second: NotNegative
    model_flops_utilisation: Number
    budget_bytes: CountOrZero
    fits: bool
    """Whether `needed_bytes` stay within the budget."""
    reserved_bytes: CountOrZero = 0
    """Bytes that the allocator reserves for the peak, its slack included; 0 where there is no caching allocator (CPU)."""
    context_bytes: CountOrZero = 0
    """Device memory that driver and libraries hold in addition."""
    worst_rank: CountOrZero = 0
    """The first rank of the pp coordinate that needs most."""
    worst_moment: str = ""
    """The moment of the step at which the worst rank reaches its peak."""
    bubble: Number = 0.0
    """Idle time over ideal time, on the pp coordinate with the most work."""
    collectives: tuple[Collective, ...] = ()
    """Calls of one rank in one step."""
    rates: RatesOrigin | None = None
    """Origin of the rates that its seconds rest on; None in a file of an earlier version."""
    error_share: Number | None = None
    """Median relative error of step times predicted by such rates; None where they were not compared with runs."""

    @property
    def needed_bytes(self) -> int:
        """Memory that a device must have: the peak, or the bytes reserved for it, and the bytes that the driver holds."""
        return max(self.peak_bytes, self.reserved_bytes) + self.context_bytes

    @property
    def origin_words(self) -> str:
        """Origin and error of the rates that its seconds rest on; empty where it is not known."""
        band = "error not known" if self.error_share is None else f"median error {self.error_share:.0%}"
        words = {
            "probe": "from rates measured on this device",
            "family": "from its data sheet and constants of its family",
            "assumed": "assumed: from its data sheet and constants of other devices",
        }
        return f"{words[self.rates]}; {band}" if self.rates is not None else ""
