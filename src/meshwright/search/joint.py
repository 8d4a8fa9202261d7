"""The joint search: every plan that agrees with the request, bounded and costed.

Candidates are all of

    dp ∈ divisors of the batch, up to the devices  ×  {replicate, ZeRO 1, 2, 3}  ×  microbatch ∈ divisors of a rank's samples
       ×  {no recompute, full recompute}

less what the request fixes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest, count_microbatches, plain_plan, share_of_batch
from meshwright.search.problem import Outcome, Problem


def joint(problem: Problem) -> Outcome:
    plans = list(candidates(problem))
    return Outcome(tuple((plan, problem.cost(plan)) for plan in plans), len(plans))


def candidates(problem: Problem) -> Iterator[Plan]:
    """Every plan that agrees with the request, legal ones only."""
    graph, request, world = problem.graph, problem.request, problem.world
    devices, global_batch = _num_devices(problem), problem.global_batch
    degrees = _degrees(request, devices, global_batch, world)
    legal = [dp for dp in degrees if request.microbatch is None or (global_batch // dp) % request.microbatch == 0]
    if not legal:
        count_microbatches(global_batch, degrees[-1], request.microbatch or 1)  # raises, with the sizes that divide
    for dp in legal:
        for part in _choices(request, global_batch // dp, dp, bool(graph.repeated_blocks)):
            wish = msgspec.structs.replace(request, global_batch=global_batch, dp=dp, **part)
            yield plain_plan(wish, graph, dp, problem.cluster.hash)


def _num_devices(problem: Problem) -> int:
    for axis in ("tp", "pp", "cp", "ep"):
        if (getattr(problem.request, axis) or 1) > 1:
            raise PlanError(
                f"{axis}={getattr(problem.request, axis)}: this version searches data-parallel plans; leave {axis} out"
            )
    return problem.devices


def _degrees(request: PlanRequest, devices: int, global_batch: int, world: int | None) -> list[int]:
    """dp degrees that divide the batch; fewer devices than there are only where nobody fixed their number."""
    fixed = request.dp if request.dp is not None else world
    if fixed is None:
        return [degree for degree in range(1, devices + 1) if global_batch % degree == 0]
    if fixed > devices or (world is not None and fixed != world):
        raise PlanError(f"dp={fixed} was asked for, but there are {devices} ranks: make them equal")
    share_of_batch(global_batch, fixed)
    return [fixed]


def _choices(request: PlanRequest, share: int, dp: int, has_blocks: bool) -> Iterator[dict[str, object]]:
    """Values of the open fields, the plainest first."""
    microbatches = [request.microbatch] if request.microbatch else [n for n in range(share, 0, -1) if share % n == 0]
    recomputes = [request.recompute] if request.recompute else (["none", "full"] if has_blocks else ["none"])
    for microbatch in microbatches:
        for zero in _zero_stages(request, dp):
            for recompute in recomputes:
                yield {"microbatch": microbatch, "zero": zero, "recompute": recompute}


def _zero_stages(request: PlanRequest, dp: int) -> list[int]:
    if request.zero is not None:
        return [request.zero]
    if request.hybrid is not None:
        return [1, 2, 3]
    return [0, 1, 2, 3] if dp > 1 else [0]
