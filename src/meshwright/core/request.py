"""A PlanRequest: the parts of a plan a person has fixed, by flags or in a file. What is open is `None`.

The search fills what is open; where nothing is searched, `plain_plan` takes the plain default for it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from meshwright.core.axes import AXES
from meshwright.core.bounds import Degree, Samples, Share
from meshwright.core.codec import CheckedValue
from meshwright.core.errors import InputError
from meshwright.core.graph import Precision
from meshwright.core.plan import ContextWay, Offload, ScheduleKind, ZeroStage

Ends = Literal["even", "fewer", "own"]
"""Where the embedding and the head go when a model is cut into stages: rules/stages.py."""

_EVERY = re.compile(r"every:([1-9]\d*)")


class PlanRequest(CheckedValue, kw_only=True):
    """The parts of a plan that somebody fixed, by the names of the plan flags; None leaves a part open.

        mw.plain_plan(mw.PlanRequest(tp=2, global_batch=64), graph, world=8, cluster=cluster.hash)

    dp, tp, pp, cp, ep            degrees of the axes; ep divides dp
    virtual, schedule, ends       stages on each pp coordinate; their order; where embedding and head go: even, fewer, own
    zero, hybrid                  ZeRO stage 0 to 3; ranks in one sharding group
    sequence_parallel, context    under tp; under cp: heads or ring
    microbatch, global_batch      samples per microbatch and dp rank; samples per step
    recompute                     none, selective, full or every:K
    precision, compile            fp64, fp32, bf16 or fp16; whether blocks are compiled
    offload, offload_share, offload_moments, offload_delayed
                                  what lies on the host, how much of it, in which dtype, and whether its update may be late
    sync_batch_norm               batch norm over the samples of all dp ranks
    """

    dp: Degree | None = None
    tp: Degree | None = None
    pp: Degree | None = None
    cp: Degree | None = None
    ep: Degree | None = None
    virtual: Degree | None = None
    ends: Ends | None = None
    zero: ZeroStage | None = None
    hybrid: Degree | None = None
    sequence_parallel: bool | None = None
    context: ContextWay | None = None
    microbatch: Samples | None = None
    global_batch: Samples | None = None
    schedule: ScheduleKind | None = None
    recompute: str | None = None
    precision: Precision | None = None
    offload: str | None = None
    offload_share: Share | None = None
    """Share of the state that is offloaded; without it, all of it."""
    offload_moments: Literal["fp32", "bf16"] | None = None
    """Precision of Adam's moments where they are offloaded; without it, fp32."""
    offload_delayed: bool | None = None
    """Whether updates on the host may be a step late."""
    compile: bool | None = None
    sync_batch_norm: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute is not None:
            parse_recompute(self.recompute)
        if self.offload not in (None, "none", "optimizer", "parameters"):
            raise InputError(f"offload '{self.offload}' is not one of none, optimizer, parameters")

    @property
    def degrees(self) -> dict[str, int | None]:
        """Of every axis, as far as they are fixed."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def fixed(self) -> dict[str, Any]:
        """The fields that are fixed, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def offloading(self, what: str | None = None) -> Offload:
        """The offload it asks for. what: the kind of state, where the request leaves it open."""
        kind = self.offload or what or "none"
        if kind == "none":
            return Offload()
        return Offload(
            what=kind,  # type: ignore[arg-type]
            share=1.0 if self.offload_share is None else self.offload_share,
            moments=self.offload_moments or "fp32",
            delayed=bool(self.offload_delayed),
        )

    def updated(self, other: PlanRequest) -> PlanRequest:
        """This request with everything the other one fixes."""
        return msgspec.structs.replace(self, **other.fixed)


def parse_recompute(text: str) -> tuple[str, int]:
    """`none`, `selective`, `full` or `every:K` → mode and stride."""
    if text in ("none", "selective", "full"):
        return text, 1
    match = _EVERY.fullmatch(text)
    if match is None:
        raise InputError(f"recompute '{text}' is not one of none, selective, full, every:K (such as every:2)")
    return "full", int(match[1])
