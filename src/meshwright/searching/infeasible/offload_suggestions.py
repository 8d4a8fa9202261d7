"""Suggestions for a plan that does not fit: offload the optimizer's state, or parameters too.

Offloaded parameters need one stage on one device, or data-parallel ranks with ZeRO 3, and full recompute (rules/limits.py). Other
plans are changed into such a plan, with all ranks data parallel. Where the hosts have too little memory, the suggestion says how
much they need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.core.axes import MODEL_AXES
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Mesh, Offload, Plan
from meshwright.rules.plain_plan import recompute_rules
from meshwright.rules.stages import even_stages
from meshwright.searching.infeasible.changes import Change, costed, first_that_fits, on_larger_hosts
from meshwright.searching.problem import Problem

STASHES = ("device", "host")


def offloads(problem: Problem, plan: Plan) -> Iterator[Change]:
    """Offload of the optimizer's state, then of parameters too, without what the plan offloads already."""
    if plan.offload.what == "none":
        change = costed("offload optimizer", problem, plan, ("offload",), offload=Offload(what="optimizer"))
        yield from first_that_fits([on_larger_hosts(change) if change is not None else None])
    if plan.offload.what != "parameters":
        yield from _first(_streamed(problem, plan))


def _first(changes: list[Change]) -> Iterator[Change]:
    """The first change that fits on these hosts; where none does, on hosts with enough memory."""
    if any(change.fits for change in changes):
        yield from first_that_fits(changes)
    else:
        yield from first_that_fits(on_larger_hosts(change) for change in changes)


def _streamed(problem: Problem, plan: Plan) -> list[Change]:
    """Parameters offloaded, with the inputs of blocks on the device and with these on the host."""
    try:
        changes = _streaming_fields(problem, plan)
    except MeshwrightError:
        return []  # nothing repeats, or the batch does not divide over the ranks
    spread = f", with dp {plan.world} and ZeRO 3" if "mesh" in changes else ""
    touched = ("offload", *(axis for axis in plan.mesh.used if axis in MODEL_AXES), *changes)
    tried = []
    for stash in STASHES:
        waiting = ", block inputs on the host too" if stash == "host" else ""
        offload = Offload(what="parameters", stash=stash)  # type: ignore[arg-type]
        words = f"offload parameters and optimizer{waiting}{spread}"
        tried.append(costed(words, problem, plan, touched, offload=offload, **changes))
    return [change for change in tried if change is not None]


def _streaming_fields(problem: Problem, plan: Plan) -> dict[str, Any]:
    """The fields of the plan that must change for parameters to be streamed."""
    found: dict[str, Any] = {}
    rules = recompute_rules("full", problem.graph.repeated_blocks)
    if plan.recompute != rules:
        found["recompute"] = rules
    if plan.world > 1 and (plan.zero, plan.hybrid) != (3, None):
        found |= {"zero": 3, "hybrid": None}
    if plan.mesh != Mesh(dp=plan.mesh.dp):
        size, left = divmod(plan.global_batch, plan.world)
        if left:
            raise MeshwrightError(f"global batch {plan.global_batch} does not divide over {plan.world} ranks")
        flat = {"mesh": Mesh(dp=plan.world), "stages": even_stages(problem.graph, 1, 1, "1f1b"), "sharding": ()}
        found |= flat | {"microbatch": 1, "num_microbatches": size, "schedule": "1f1b", "virtual": 1}
        found |= {"sequence_parallel": False, "context": "heads", "zero": 3, "hybrid": None}
    return found
