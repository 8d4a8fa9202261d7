"""The plan flags as keywords: `zero=2`, `precision="bf16"`. The same names, words and limits as on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import msgspec

from meshwright.core.codec import decode
from meshwright.core.errors import InputError, nearest
from meshwright.core.graph import Precision
from meshwright.core.plan import ContextWay, ScheduleKind, ZeroStage
from meshwright.core.request import Ends, PlanRequest
from meshwright.interop.flag_names import our_name


class SweptFlags(TypedDict, total=False):
    """All that can be fixed of a plan but the global batch, which a sweep goes through."""

    dp: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    ep: int | None
    virtual: int | None
    ends: Ends | None
    zero: ZeroStage | None
    hybrid: int | None
    sequence_parallel: bool | None
    context: ContextWay | None
    microbatch: int | None
    schedule: ScheduleKind | None
    recompute: str | None
    precision: Precision | None
    offload: Literal["none", "optimizer", "parameters"] | None
    offload_share: float | None
    offload_moments: Literal["fp32", "bf16"] | None
    offload_delayed: bool | None
    compile: bool | None
    sync_batch_norm: bool | None


class PlanFlags(SweptFlags, total=False):
    """The parts of a plan that can be fixed. Parts that are left out are searched, or take their plain defaults."""

    global_batch: int | None


def request_of(flags: PlanFlags | SweptFlags, verb: Callable[..., Any]) -> PlanRequest:
    """Keywords → a request. One that no plan has and the verb does not take is refused with the nearest that there is."""
    fixed: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    known = PlanRequest.__struct_fields__
    for name in flags:
        if name not in known:
            own = [p.name for p in inspect.signature(verb).parameters.values() if p.kind is not p.VAR_KEYWORD]
            raise InputError(f"mw.{verb.__name__} takes no keyword '{name}': {_hint(name, [*known, *own])}")
    return decode(msgspec.to_builtins(fixed), PlanRequest, "plan flags")


def _hint(name: str, taken: list[str]) -> str:
    """What another library calls so; else the nearest."""
    ours = our_name(name)
    if ours is not None and ours.partition("=")[0] in taken:
        keyword, _, value = ours.partition("=")
        return f"it is called {keyword} here" + (f", {keyword}={value!r}" if value else "")
    return nearest(name, taken)
