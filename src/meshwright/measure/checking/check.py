"""A small copy of a user's model, compared with one process in float64 under every pair of axes that a plan uses.

the same loss, gradients and parameters       the run begins; what was compared is remembered, and not compared again
a difference, a refusal, a hang               the run does not begin: the first tensor that differs is named
one process fails in float64 on the CPU       not checked, and said: the model has kernels without such a form
the copy is too large to run here             not checked, and said
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from meshwright.capturing.capture import capture_source
from meshwright.core.codec import Value
from meshwright.core.errors import FailsUnderPlanError, HangError, MeshwrightError, PlanError, RefusedError, RunError
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.core.result import describe
from meshwright.measure.checking.kept import Kept
from meshwright.measure.checking.reduced import needs_check, reduced
from meshwright.measure.checking.small_plan import SAMPLES_PER_RANK, small_plan
from meshwright.measure.cutting import CannotCutError
from meshwright.models.shortened import BLOCKS, shortened
from meshwright.models.source import ModelSource
from meshwright.runtime.launch import launch

STEPS = 2
TIMEOUT_SECONDS = 120.0
MOST_PARAMETERS = 60_000_000
MOST_FLOPS = 2e12
"""Of one step of the copy, forward and backward on a few samples: about a minute for all that run it."""


class Checked(Value, kw_only=True):
    """What came of a check."""

    status: Literal["same", "remembered", "not needed", "not checked"]
    words: str = ""
    """Why a model was not checked."""
    plans: tuple[str, ...] = ()
    seconds: float = 0.0


def check(source: ModelSource, plan: Plan, payload: dict[str, Any], kept: Kept, say: Callable[[str], None]) -> Checked:
    """source: small. payload: what a rank finds the same source with (`ranks.find`). Raises PlanError where the two differ."""
    if not needs_check(plan) or source.example is None:
        return Checked(status="not needed")
    start, done = time.monotonic(), []
    try:
        source, payload, graph = _small_enough(source, payload)
        for request, num_ranks in reduced(plan):
            small = _made_small(source, request, num_ranks, graph)
            if not kept.has(graph.identity, small.hash):
                say(
                    f"checking a small copy under {describe(small)} against one process ({num_ranks} ranks on this host)"
                )
                _compare(small, payload, num_ranks)
                kept.add(graph.identity, small.hash)
                done.append(describe(small))
    except NotCheckedError as error:
        return Checked(status="not checked", words=str(error))
    return Checked(status="same" if done else "remembered", plans=tuple(done), seconds=time.monotonic() - start)


class NotCheckedError(MeshwrightError):
    """The comparison could not be made."""


def _small_enough(source: ModelSource, payload: dict[str, Any]) -> tuple[ModelSource, dict[str, Any], Graph]:
    """As it is, or with few of its repeated blocks."""
    graph = capture_source(source, "fp64")
    if not _too_large(graph):
        return source, payload, graph
    short = shortened(source)
    try:
        graph = capture_source(short, "fp64")
    except MeshwrightError as error:
        raise NotCheckedError(f"{_too_large(graph)}; with {BLOCKS} blocks alone it does not run: {error}") from None
    if _too_large(graph):
        raise NotCheckedError(_too_large(graph))
    return short, payload | {"shortened": True}, graph


def _too_large(graph: Graph) -> str:
    if graph.num_parameters > MOST_PARAMETERS:
        return f"its small copy still has {graph.num_parameters / 1e6:.0f} million parameters, too many for float64 on this host"
    flops = graph.flops(SAMPLES_PER_RANK)
    return f"a step of its small copy takes {flops:.1e} floating-point operations" if flops > MOST_FLOPS else ""


def _made_small(source: ModelSource, request: PlanRequest, num_ranks: int, graph: Graph) -> Plan:
    """What a small copy cannot have, such as many stages of its few blocks, says nothing about the model itself."""
    try:
        return small_plan(source, request, num_ranks, graph)
    except CannotCutError:
        raise
    except PlanError as error:
        raise NotCheckedError(f"no such plan could be made for a small copy: {error}") from None


def _compare(small: Plan, payload: dict[str, Any], num_ranks: int) -> None:
    told = {**payload, "plan": msgspec.to_builtins(small), "steps": STEPS, "timeout": TIMEOUT_SECONDS}
    try:
        result = launch("meshwright.measure.checking.ranks:check_rank", told, num_ranks)
    except (RefusedError, FailsUnderPlanError) as error:
        raise PlanError(f"{error}\nSo said the check of a small copy under {describe(small)}") from None
    except HangError as error:
        raise PlanError(f"a small copy of the model hangs under {describe(small)}: {error}") from None
    except RunError as error:
        raise NotCheckedError(f"the comparison under {describe(small)} broke off: {error}") from None
    if result.get("not_checked"):
        raise NotCheckedError(result["not_checked"])
    if not result["ok"]:
        raise PlanError(
            f"under {describe(small)} a small copy of the model does not do what one process does: {result['first_difference']}. "
            "`meshwright parity` shows all of it; use another plan (leave out one of its axes), or report this model"
        )
