"""A Foreign configuration: what another library's file says about a plan.

Reading is strict. Every key is used, or known to be without effect on a plan, or known to be something a plan does not do (and
said so where it is on), or refused by name. `auto` leaves a part open. Batch sizes must multiply out:

    train batch = microbatch · microbatches a step · dp                                                        -> batch_of
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from meshwright.core.axes import RANK_AXES
from meshwright.core.bounds import LARGEST_NUMBER, MOST_SAMPLES
from meshwright.core.codec import Value
from meshwright.core.errors import InputError, nearest, shortened
from meshwright.core.graph import Graph
from meshwright.core.plan import Offload, Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.interop.foreign_keys import KnownKeys
from meshwright.rules.plain_plan import plain_plan

AUTO = "auto"


class Foreign(Value, kw_only=True):
    """A configuration of another library, as far as a plan can express it."""

    where: str
    request: PlanRequest
    num_microbatches: int | None = None
    """Steps of gradient accumulation; None where it is left open."""
    offload: Offload = Offload()
    recipe: Recipe = Recipe()
    num_ranks: int | None = None
    num_hosts: int | None = None
    without_effect: tuple[str, ...] = ()
    """Keys that change nothing a plan decides, each with the reason."""
    not_planned: tuple[str, ...] = ()
    """Features it asks for that a plan does not have, and what is costed instead."""


class Keys:
    """The keys of a file after a strict look at all of them."""

    def __init__(self, raw: object, known: KnownKeys, where: str) -> None:
        self.where, self._known = where, known
        self.values: dict[str, Any] = {}
        self.without_effect: list[str] = []
        self.not_planned: list[str] = []
        self._read(raw, "")

    def _read(self, raw: object, section: str) -> None:
        if not isinstance(raw, dict):
            raise InputError(f"{self.where}: {section or 'the file'} holds {_shown(raw)}, not keys with values")
        known = self._known[section]
        for key, value in raw.items():
            name = f"{section}.{key}" if section else str(key)
            if key not in known:
                raise InputError(f"{self.where}: {name}: unknown key '{key}': {nearest(str(key), known)}")
            kind, why = known[key]
            if kind == "used":
                self.values[name] = value
            elif kind == "without effect":
                self.without_effect.append(f"{name}: {why}")
            elif kind == "section" and value is not None:
                self._read(value, name)
            elif kind == "not planned" and _is_on(value):
                self.not_planned.append(f"{name}: {why}")

    def number(self, name: str, least: int = 1) -> int | None:
        """A whole number; None where it is not given or `auto`."""
        value = self.values.get(name)
        if value in (None, AUTO):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_SAMPLES:
            raise InputError(
                f"{self.where}: {name} is {_shown(value)}: give a whole number of {least} to {MOST_SAMPLES}, or 'auto'"
            )
        return value

    def share(self, name: str) -> float | None:
        value = self.values.get(name)
        if value in (None, AUTO):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_NUMBER:
            raise InputError(f"{self.where}: {name} is {_shown(value)}: give a number of 0 to {LARGEST_NUMBER:g}")
        return float(value)

    def switch(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value in (None, AUTO):
            return None
        if not isinstance(value, bool):
            raise InputError(f"{self.where}: {name} is {_shown(value)}: give true, false or 'auto'")
        return value

    def word(self, name: str, valid: tuple[str, ...]) -> str | None:
        """One of some words, in any case; None where it is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        by_folded = {word.casefold(): word for word in valid}
        found = by_folded.get(str(value).casefold())
        if found is None:
            raise InputError(f"{self.where}: {name} is {_shown(value)}: {nearest(str(value), valid)}")
        return found


def foreign_plan(foreign: Foreign, flags: PlanRequest, graph: Graph, num_devices: int, cluster: str) -> Plan:
    """The file's plan. Flags give what it leaves open; one that says otherwise than the file is refused."""
    world = foreign.num_ranks or num_devices
    request = filled(foreign, flags)
    dp = _dp(request, world, foreign.where)
    global_batch, microbatch = batch_of(foreign, request, dp)
    request = msgspec.structs.replace(request, dp=dp, global_batch=global_batch, microbatch=microbatch)
    plan = plain_plan(request, graph, world, cluster)
    return msgspec.structs.replace(plan, offload=foreign.offload) if foreign.offload.what != "none" else plan


def filled(foreign: Foreign, flags: PlanRequest) -> PlanRequest:
    """The file's request, with the flags for the parts that it leaves open."""
    said = foreign.request.fixed
    for name, value in flags.fixed.items():
        if said.get(name, value) != value:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{foreign.where} says {name.replace('_', ' ')} {said[name]}, but {flag} is {value}: leave the flag out, or "
                "change the file"
            )
    return foreign.request.updated(flags)


def batch_of(foreign: Foreign, request: PlanRequest, dp: int) -> tuple[int, int]:
    """Global batch and microbatch, from any two of batch, microbatch and their number; one microbatch where that is open."""
    where, count = foreign.where, foreign.num_microbatches
    batch, size = request.global_batch, request.microbatch
    if batch is None and size is None:
        raise InputError(
            f"{where} leaves the batch size to the script: give it with --global-batch (samples a step over all ranks), and "
            "--microbatch (samples a rank takes at once) where they are not taken all at once"
        )
    if size is None:
        assert batch is not None
        ranks = dp * (count or 1)
        if batch % ranks:
            steps = f"{count} accumulation steps × " if count else ""
            raise InputError(
                f"{where}: a batch of {batch} does not divide over {steps}dp {dp}: make it a multiple of {ranks}, or change the "
                "number of ranks"
            )
        return batch, batch // ranks
    batch = size * (count or 1) * dp if batch is None else batch
    if batch % (size * dp) or (count is not None and size * count * dp != batch):
        steps = f" × {count} accumulation steps" if count else ""
        raise InputError(
            f"{where}: microbatches of {size}{steps} × dp {dp} do not make a batch of {batch}: make the batch a multiple of "
            f"{size * (count or 1) * dp}, or change the number of ranks"
        )
    return batch, size


def _dp(request: PlanRequest, world: int, where: str) -> int:
    given = {axis: degree for axis in RANK_AXES if (degree := request.degrees[axis])}
    others = prod(degree for axis, degree in given.items() if axis != "dp")
    if world % others or (request.dp is not None and request.dp * others != world):
        degrees = " · ".join(f"{axis} {degree}" for axis, degree in given.items())
        raise InputError(
            f"{where}: degrees {degrees} do not make {world} ranks: change a degree, or the number of ranks"
        )
    return world // others


def _is_on(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value.get("enabled", True)) if value else False
    return value not in (None, False, 0, 1, 1.0, "", "none", "None", "no", AUTO) or value is True


def _shown(value: object) -> str:
    return shortened(f"'{value}'" if isinstance(value, str) else f"{value}")
