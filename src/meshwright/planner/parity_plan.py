"""The plan of a parity run: what was asked for, or a plan file, for the model made small."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.core.graph import Graph
    from meshwright.core.plan import Plan
    from meshwright.core.request import PlanRequest


def plain_plan_of_small(model: str, request: PlanRequest, num_ranks: int) -> Plan:
    """What was asked for, with plain defaults."""
    import msgspec

    from meshwright.measure.checking.small_plan import small_plan
    from meshwright.models.source import resolve

    return msgspec.structs.replace(small_plan(resolve(model).small(), request, num_ranks), model=model)


def plan_of_small(model: str, plan: Plan, file: str) -> Plan:
    """The whole plan of a file: its shardings, stages and recompute, laid on the small model's blocks."""
    import msgspec

    from meshwright.capturing.capture import capture_source
    from meshwright.cost.degrees import check_divides
    from meshwright.models.source import resolve
    from meshwright.planner.graphs import graph_of
    from meshwright.planner.shardings import try_sharding
    from meshwright.planner.shrunk import shrunk_plan
    from meshwright.rules.limits import check_runs

    whole = graph_of(model, plan.precision, plan.casting)
    _check_file(plan, whole, file)
    small = resolve(model).small()
    graph = capture_source(small, "fp64")
    laid = msgspec.structs.replace(shrunk_plan(plan, whole, graph), model=model, cluster="parity", precision="fp64")
    check_runs(laid)
    check_divides(graph, laid)
    tried = try_sharding(laid, small)
    _check_runs_as_written(laid, tried, graph, file)
    return tried


def _check_file(plan: Plan, whole: Graph, file: str) -> None:
    """Made for this model, of blocks and tensors that it has."""
    from meshwright.cost.degrees import check_divides
    from meshwright.planner.estimate import check_made_for
    from meshwright.rules.sharding import ways_by_block
    from meshwright.rules.stages import check_blocks

    check_made_for(plan, whole, file)
    check_blocks(whole, plan)
    ways_by_block(plan, whole)
    check_divides(whole, plan)
    _check_sizes(plan, whole, file)


def _check_sizes(plan: Plan, whole: Graph, file: str) -> None:
    """Every run of a sharded dim divides over tp."""
    from meshwright.core.errors import PlanError
    from meshwright.core.names import expand_names

    shapes = {(parameter.block, parameter.own_name): parameter.shape for parameter in whole.parameters}
    of_kind = {block.kind: block.name for block in reversed(whole.blocks)}
    for rule in plan.sharding:
        block = of_kind[rule.for_kind] if rule.for_kind else expand_names(rule.for_blocks)[0]
        for tensor in rule.tensors:
            size = shapes[block, tensor.tensor][tensor.dims.index("tp")] if "tp" in tensor.dims else 0
            if size % (tensor.runs * plan.mesh.tp):
                raise PlanError(
                    f"{file} shards a dim of size {size} of '{tensor.tensor}' of block '{block}' in {tensor.runs} runs, which does "
                    f"not divide over tp={plan.mesh.tp}: change tp, or leave that tensor whole"
                )


def _check_runs_as_written(laid: Plan, tried: Plan, graph: Graph, file: str) -> None:
    """What does not run as the file says is refused, but for rows that only the small model's sizes do not divide."""
    from meshwright.core.errors import PlanError
    from meshwright.core.names import expand_names

    shapes = {(parameter.block, parameter.own_name): parameter.shape for parameter in graph.parameters}
    for rule, found in zip(laid.sharding, tried.sharding, strict=True):
        block = expand_names(rule.for_blocks)[0]
        for written, runs in zip(rule.tensors, found.tensors, strict=True):
            name = f"'{written.tensor}' of block '{block}'"
            if runs.dims != written.dims:
                dim = written.dims.index("tp")
                if shapes[block, written.tensor][dim] % laid.mesh.tp == 0:
                    raise PlanError(f"{file} shards {name}, which does not run: {runs.reason}; leave that tensor whole")
            elif runs.runs != written.runs:
                raise PlanError(
                    f"{file} cuts {name} in {written.runs} runs, but the model reads it in {runs.runs}: set its runs to "
                    f"{runs.runs}"
                )
