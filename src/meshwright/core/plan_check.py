"""Contradictions between parts of a plan, for which it is refused.

microbatch · num_microbatches · dp = global_batch                           -> _check_batch
a stage for each pp coordinate and virtual stage, each block in one         -> _check_stages
every stage is on the coordinate that the schedule lays it on               -> _check_places
tensors of known blocks lie over axes that tensors can lie over             -> _check_sharding
a ring of keys and values has more than one rank                            -> _check_context
a group that shards less than everything divides dp, under ZeRO             -> _check_sharding_group
a block is recomputed in one mode, or its activations wait on the host      -> _check_recompute, _check_activations
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshwright.core.axes import TENSOR_AXES
from meshwright.core.bounds import MOST_ACTIONS
from meshwright.core.errors import PlanError
from meshwright.core.names import expand_names
from meshwright.core.pipeline.kinds import check_virtual
from meshwright.core.pipeline.placement import coordinate_of

if TYPE_CHECKING:
    from meshwright.core.plan import Plan


def check_plan(plan: Plan) -> None:
    _check_batch(plan)
    _check_stages(plan)
    _check_places(plan)
    _check_sharding(plan)
    _check_context(plan)
    _check_sharding_group(plan)
    _check_recompute(plan)
    _check_activations(plan)


def _check_batch(plan: Plan) -> None:
    product = plan.microbatch * plan.num_microbatches * plan.mesh.dp
    if product != plan.global_batch:
        raise PlanError(
            f"microbatch {plan.microbatch} × num_microbatches {plan.num_microbatches} × dp {plan.mesh.dp} = {product}, "
            f"but global_batch is {plan.global_batch}: make the product equal"
        )


def _check_stages(plan: Plan) -> None:
    expected = plan.mesh.pp * plan.virtual
    if expected > 1 and expected * plan.num_microbatches > MOST_ACTIONS:
        raise PlanError(
            f"{expected} stages × {plan.num_microbatches} microbatches make a schedule of more than {MOST_ACTIONS} units of work: "
            "make microbatches larger, or lower pp · virtual"
        )
    if len(plan.stages) != expected:
        raise PlanError(
            f"plan has {len(plan.stages)} stages but mesh axis 'pp' has degree {plan.mesh.pp} with {plan.virtual} "
            f"virtual: give {expected} stages, one per pp coordinate and virtual stage"
        )
    repeated = [name for name, count in Counter(plan.blocks).items() if count > 1]
    if repeated:
        raise PlanError(f"block '{repeated[0]}' is in more than one stage: give each block to one stage")
    check_virtual(plan.schedule, plan.virtual, PlanError)


def _check_places(plan: Plan) -> None:
    pp = plan.mesh.pp
    for number, stage in enumerate(plan.stages):
        if stage.coordinate >= pp:
            raise PlanError(
                f"stage {number} is on pp coordinate {stage.coordinate}, but pp={pp}: place it on one of 0 to {pp - 1}"
            )
        home = coordinate_of(number, pp, plan.placement)
        if stage.coordinate != home:
            shape = "a V" if plan.placement == "v" else "a loop"
            raise PlanError(
                f"stage {number} is on pp coordinate {stage.coordinate}, but schedule '{plan.schedule}' places stages in {shape}: "
                f"place it on {home}"
            )


def _check_sharding(plan: Plan) -> None:
    _check_known(plan, "sharding", [name for rule in plan.sharding for name in rule.for_blocks])
    for tensor in (tensor for rule in plan.sharding for tensor in rule.tensors):
        for axis in tensor.dims:
            if axis and axis not in TENSOR_AXES:
                raise PlanError(
                    f"a dim of tensor '{tensor.tensor}' is sharded over '{axis}': "
                    f"use one of {', '.join(TENSOR_AXES)}, or leave it empty where the dim is whole"
                )


def _check_known(plan: Plan, field: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """The blocks that a field of the plan names, all of them in some stage."""
    names = expand_names(patterns)
    unknown = set(names) - set(plan.blocks)
    if unknown:
        raise PlanError(f"{field} names block '{min(unknown)}', which is in no stage: name blocks of a stage")
    return names


def _check_context(plan: Plan) -> None:
    if plan.context == "ring" and plan.mesh.cp == 1:
        raise PlanError(
            "context='ring' sends keys and values round the cp ranks, but cp=1: raise cp, or leave context out"
        )
    _check_known(plan, "token_blocks", plan.token_blocks)


def _check_sharding_group(plan: Plan) -> None:
    if plan.hybrid is None:
        return
    if plan.zero == 0:
        raise PlanError(f"hybrid={plan.hybrid} without ZeRO: set zero to 1, 2 or 3, or leave hybrid out")
    if plan.mesh.dp % plan.hybrid:
        raise PlanError(
            f"hybrid={plan.hybrid} does not divide dp={plan.mesh.dp}: set it to a divisor of dp, or leave it out"
        )


def _check_recompute(plan: Plan) -> None:
    counts = Counter(_check_known(plan, "recompute", [name for rule in plan.recompute for name in rule.blocks]))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise PlanError(f"recompute names block '{repeated[0]}' more than once: give each block one mode")


def _check_activations(plan: Plan) -> None:
    offloaded = _check_known(plan, "offload.activations", plan.offload.activations)
    recomputed = set(expand_names(name for rule in plan.recompute for name in rule.blocks))
    both = [name for name in offloaded if name in recomputed]
    if both:
        raise PlanError(f"block '{both[0]}' is both recomputed and has its activations offloaded: choose one for it")
