"""The collectives that one rank calls for parameters, gradients, and the numbers of a step.

Gradients come of all samples and tokens: they are added up over the dp · cp ranks that hold the same parameters, N below.
m microbatches, one row per group of parameters (a block, or all that is in none):

    ZeRO 0   all-reduce of the gradients over N, in buckets, once a step; each stage's own  -> bucket_bytes
    ZeRO 1   all-gather of each group once a step; reduce-scatter once a step
    ZeRO 2   all-gather once a step; reduce-scatter in each microbatch
    ZeRO 3   all-gather before forward and before backward in each microbatch (the rest group once); reduce-scatter in each

    streamed all-gather of a block's rows when it comes to the device: in forward, and in backward unless the window still has it;
             reduce-scatter of its rows once a step, all-reduce of what is not cut, with a figure for each tensor; what stays on
             the device, all-reduce of each tensor, and a figure for each                                  -> _streamed

ZeRO shards over these N ranks, or groups of H of them (hybrid); the N/H ranks that hold the same shard all-reduce it, once a
step. All of it counts as axis dp. In addition, once a step:

    tied     a tensor with names on several pp coordinates: all-reduce of its gradient between them      -> _tied_calls
    sp       each tp rank saw its part of the tokens: all-reduce over tp of the gradients of all tensors that are whole,
             norms, rows' biases, in one call; not of tables that every rank looks up whole (positions)  -> _whole_calls
    norms    batch norms that are synchronised: two numbers a channel that the rank has, in forward and in backward
                                                                                                   -> _batch_norm_calls
    numbers  how many tokens, the loss, which the last stage has; over every axis that divides gradients, whether they are
             finite in fp16, and the squared norm where they are clipped                                 -> _number_calls
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.core.axes import Axis
from meshwright.core.collective import COUNT_BYTES, FLAG_BYTES, LOSS_BYTES, NORM_BYTES
from meshwright.core.graph import Graph, Parameter
from meshwright.core.names import is_list_item
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.cost.communication.block_calls import is_whole_lookup
from meshwright.cost.communication.links import Call, Group, axis_group
from meshwright.cost.compute.recomputed_ops import recompute_modes
from meshwright.cost.local_block import make_local_blocks
from meshwright.cost.memory.local_parameters import (
    Items,
    blocks_on,
    groups_of,
    held_elements,
    items_of,
    local_parameters,
    split_dims,
    stage_parameters,
    total_elements,
)
from meshwright.rules.groups import fill_buckets

FIGURE_BYTES = 4
"""Of what ranks tell each other about a tensor that stays on the device (runtime/offload/resident.py)."""
BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")


def step_calls(graph: Graph, plan: Plan, recipe: Recipe, coordinate: int) -> tuple[Call, ...]:
    """The collectives of a rank on this coordinate outside the blocks."""
    parameters = local_parameters(graph, plan, coordinate)
    of_stages = (call for number in plan.stages_on(coordinate) for call in stage_calls(graph, plan, recipe, number))
    return (
        *(call for call in of_stages if call.group.size > 1),
        *_tied_calls(graph, plan, recipe, parameters, coordinate),
        *_whole_calls(graph, plan, recipe, parameters),
        *_batch_norm_calls(graph, plan, recipe, coordinate),
        *_number_calls(plan, recipe),
    )


# ---------------------------------------------------------------- dp and cp


def stage_calls(
    graph: Graph, plan: Plan, recipe: Recipe, number: int, splits: dict[tuple[str, str], int] | None = None
) -> Iterator[Call]:
    """Collectives of one stage's parameters: parameters outside the blocks are a group of each stage. Under ZeRO on one rank
    they are calls in a group of one, which only cast and pack.

    splits: `split_dims`, where many stages are asked for.
    """
    parameters = stage_parameters(graph, plan, number, splits)
    dense = tuple(p for p in parameters if not p.expert or plan.mesh.ep == 1)
    experts = tuple(p for p in parameters if p.expert and plan.mesh.ep > 1)
    group = axis_group(plan.mesh, "dp")
    rest = Group(plan.mesh.dp // plan.mesh.ep, group.stride * plan.mesh.ep)
    yield from _state_calls(graph, plan, recipe, dense, group)
    if experts and with_cp(plan, rest).size > 1:
        yield from _state_calls(graph, plan, recipe, experts, rest)


def _state_calls(
    graph: Graph, plan: Plan, recipe: Recipe, parameters: tuple[Parameter, ...], group: Group
) -> Iterator[Call]:
    """group: the dp ranks that hold these parameters."""
    items, everyone = items_of(plan, recipe), with_cp(plan, group)
    if everyone.size == 1 and (plan.zero == 0 or plan.offload.what == "parameters" or not recipe.system.packs):
        return
    if plan.offload.what == "parameters" and plan.zero == 3:
        yield from _streamed(plan, parameters, items, everyone)
    elif plan.zero == 0:
        for size in bucket_bytes(_in_bucket_order(graph, plan, parameters), items.reduced):
            yield Call("all_reduce", size, 1, "backward", "dp", everyone)
    elif plan.zero == 1 and recipe.system.reduces_whole:
        elements = total_elements(parameters, trainable_only=True)
        yield Call("all_reduce", elements * items.reduced, 1, "update", "dp", everyone)
        if group.size > 1:
            yield Call("all_gather", elements * items.gathered // group.size, 1, "update", "dp", group)
    else:
        yield from _sharded(plan, parameters, items, everyone)


def with_cp(plan: Plan, group: Group) -> Group:
    """The ranks of a dp group and their neighbours along cp; taken as evenly spread where they are not."""
    if plan.mesh.cp == 1:
        return group
    if group.size == 1:
        return axis_group(plan.mesh, "cp")
    return Group(group.size * plan.mesh.cp, group.stride // plan.mesh.cp)


def _in_bucket_order(graph: Graph, plan: Plan, parameters: tuple[Parameter, ...]) -> list[Parameter]:
    """The trained parameters in the order of their buckets."""
    trained = [parameter for parameter in parameters if parameter.trainable]
    if plan.mesh.ep > 1 and any(parameter.expert for parameter in trained):
        return trained[::-1]  # from the last to the first, where experts lie over ep (runtime/buckets.py)
    if (
        plan.mesh.pp > 1
    ):  # a stage fills them when its last backward is done: from the last block to the first, then the rest
        places = {name: place for place, name in enumerate(plan.blocks)}
        return sorted(trained, key=lambda parameter: places.get(parameter.block, -1))[::-1]
    ready = {parameter.name: place for place, parameter in enumerate(graph.trained)}  # DistributedDataParallel's order
    return sorted(trained, key=lambda parameter: ready.get(parameter.name, -1))


def bucket_bytes(parameters: Iterable[Parameter], item_bytes: int) -> list[int]:
    """Buckets fill as gradients become ready; a full one is closed."""
    buckets = fill_buckets(parameters, lambda parameter: parameter.num_elements * item_bytes)
    return [sum(parameter.num_elements for parameter in bucket) * item_bytes for bucket in buckets]


def _sharded(plan: Plan, parameters: tuple[Parameter, ...], items: Items, everyone: Group) -> Iterator[Call]:
    """everyone: the ranks that hold these parameters, along dp and cp."""
    degree, microbatches = min(plan.shard_degree, everyone.size), plan.num_microbatches
    inner = Group(degree, everyone.stride)
    outer = Group(everyone.size // degree, everyone.stride * degree)
    for name, members in groups_of(parameters, plan).items():
        gathered = total_elements(members, degree) * items.gathered
        shard = total_elements(members, degree, trainable_only=True)
        gathers = microbatches if plan.zero == 3 else 1
        times = 1 if plan.zero == 1 else microbatches
        shards = inner.size > 1 or outer.size == 1
        if shards:
            yield Call("all_gather", gathered, gathers, "forward", "dp", inner, name)
        if shards and plan.zero == 3 and name:
            yield Call("all_gather", gathered, gathers, "backward", "dp", inner, name)
        if shards and shard:
            yield Call("reduce_scatter", degree * shard * items.reduced, times, "backward", "dp", inner, name)
        if outer.size > 1 and shard:
            yield Call("all_reduce", shard * items.reduced, 1, "backward", "dp", outer, name)


def _streamed(plan: Plan, parameters: tuple[Parameter, ...], items: Items, group: Group) -> Iterator[Call]:
    """As runtime/offload/shards.py has it: of a tensor whose first dim divides, each rank has its rows."""
    own = [one for one in parameters if one.tied_to is None]
    blocks = {name: members for name, members in groups_of(own, plan).items() if is_list_item(name)}
    in_window = list(blocks)[-plan.offload.window :]
    for name, members in blocks.items():
        cut = total_elements(one for one in members if one.shape and one.shape[0] % group.size == 0)
        whole = total_elements(members) - cut
        if cut:
            yield Call("all_gather", cut // group.size * items.gathered, 1, "forward", "dp", group, name)
        if cut and name not in in_window:
            yield Call("all_gather", cut // group.size * items.gathered, 1, "backward", "dp", group, name)
        if any(one.trainable for one in members):
            if cut:
                yield Call("reduce_scatter", cut * items.reduced, 1, "backward", "dp", group, name)
            yield Call("all_reduce", (whole + len(members)) * items.reduced, 1, "backward", "dp", group, name)
    kept = [one for one in own if one.block not in blocks]
    if kept:
        yield Call("all_reduce", len(kept) * FIGURE_BYTES, 1, "update", "dp", group)
    for one in kept:
        if one.trainable:
            yield Call("all_reduce", one.num_elements * items.reduced, 1, "update", "dp", group)


# ---------------------------------------------------------------- once a step


def _tied_calls(
    graph: Graph, plan: Plan, recipe: Recipe, parameters: tuple[Parameter, ...], coordinate: int
) -> Iterator[Call]:
    """All-reduce of each rank's part of the gradient (its shard under ZeRO), after the reduction over dp."""
    if plan.mesh.pp == 1:
        return
    first_name = {p.name: p.tied_to or p.name for p in graph.parameters}
    places: dict[str, set[int]] = {}
    for parameter in graph.parameters:
        stage = plan.stages[plan.stage_of.get(parameter.block, 0)]
        places.setdefault(first_name[parameter.name], set()).add(stage.coordinate)
    apart = axis_group(plan.mesh, "pp").stride
    for parameter in {first_name[parameter.name]: parameter for parameter in parameters}.values():
        here = places[first_name[parameter.name]]
        if len(here) > 1 and coordinate in here and parameter.trainable:
            group = Group(len(here), apart * (max(here) - min(here)) // (len(here) - 1))
            size = held_elements([parameter], plan) * items_of(plan, recipe).reduced
            yield Call("all_reduce", size, 1, "other", "pp", group)


def _whole_calls(graph: Graph, plan: Plan, recipe: Recipe, parameters: tuple[Parameter, ...]) -> Iterator[Call]:
    if not plan.sequence_parallel:
        return
    kinds = graph.kind_by_block
    lookups = {  # tables whose gradient every rank has whole
        (block.name, op.inputs[0])
        for block in graph.blocks
        for _, op in kinds[block.name].forward_ops
        if is_whole_lookup(op) and op.inputs
    }
    others = {*split_dims(graph, plan), *lookups}
    whole = [p for p in parameters if (p.block, p.own_name) not in others]
    elements = held_elements(whole, plan, trainable_only=True)
    if elements:
        size = elements * items_of(plan, recipe).reduced
        yield Call("all_reduce", size, 1, "other", "tp", axis_group(plan.mesh, "tp"))


def _batch_norm_calls(graph: Graph, plan: Plan, recipe: Recipe, coordinate: int) -> Iterator[Call]:
    """Mean and mean square of every channel in forward, two sums in backward, in each microbatch; a recompute asks again."""
    if not plan.sync_batch_norm or plan.mesh.dp == 1:
        return
    group, item = axis_group(plan.mesh, "dp"), plan.master_bytes
    here, modes, kinds = {*blocks_on(plan, coordinate)}, recompute_modes(plan, recipe), graph.kind_by_block
    local_blocks = make_local_blocks(graph, plan)
    for block in graph.blocks:
        if block.name not in here and (block.name or coordinate):
            continue
        labels = local_blocks[block.name].labels
        times = plan.num_microbatches * (3 if modes.get(block.name) == "full" else 2)
        for _, op in kinds[block.name].forward_ops:
            if op.name in BATCH_NORMS:
                channels = op.input_shapes[0][1].fixed / (plan.mesh.tp if labels.of(op.inputs[0]) == "split" else 1)
                size = round(2 * item * channels)
                yield Call("all_reduce", size, times * op.count, "other", "dp", group, block.name)


def _number_calls(plan: Plan, recipe: Recipe) -> Iterator[Call]:
    group = axis_group(plan.mesh, "dp")
    if group.size > 1:
        yield Call("all_reduce", COUNT_BYTES, 1, "other", "dp", group)
        yield Call("all_reduce", LOSS_BYTES, 1, "other", "dp", group)
    if plan.mesh.pp > 1:
        yield Call("all_reduce", LOSS_BYTES, 1, "other", "pp", axis_group(plan.mesh, "pp"))
    numbers = [FLAG_BYTES] * (plan.precision == "fp16") + [NORM_BYTES] * recipe.clips
    for size in numbers:
        yield from (Call("all_reduce", size, 1, "other", axis, ranks) for axis, ranks in _dividing_groups(plan))


def _dividing_groups(plan: Plan) -> Iterator[tuple[Axis, Group]]:
    """Along each axis that divides gradients, the ranks that hold the parts."""
    mesh = plan.mesh
    if plan.shard_degree > 1:
        yield "dp", Group(plan.shard_degree, with_cp(plan, axis_group(mesh, "dp")).stride)
    elif mesh.ep > 1:
        yield "ep", axis_group(mesh, "ep")
    if mesh.tp > 1:
        yield "tp", axis_group(mesh, "tp")
    if mesh.pp > 1:
        yield "pp", axis_group(mesh, "pp")
