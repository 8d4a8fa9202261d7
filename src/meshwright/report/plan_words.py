"""A plan in words: what lies where, in sentences a person can check against their cluster.

Ranks lie on hosts in the order of the mesh, tp innermost, then cp, dp, pp (cost/communication/links.py). A group of g ranks,
every s-th rank, on hosts of D devices is

    inside each host                      where s · g divides D, or the whole plan is on one host
    across hosts, each on another         where D divides s
    across hosts, r = D / s on each       where s divides D and r divides g
    across hosts, unevenly                else                                                              -> place_words
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.core.axes import Axis
from meshwright.core.cluster import Cluster
from meshwright.core.graph import Graph
from meshwright.core.names import compact_names, expand_names, is_list_item
from meshwright.core.pipeline.kinds import kind_of
from meshwright.core.plan import Plan
from meshwright.cost.communication.links import Group, axis_group
from meshwright.rules.limits import not_yet

SHARDED = {
    1: "optimizer state sharded",
    2: "optimizer state and gradients sharded",
    3: "optimizer state, gradients and parameters sharded",
}
CONTEXT_WORDS = {"heads": "tokens exchanged for heads", "ring": "keys and values in a ring"}
MOST_STAGES_LISTED = 8


def plan_in_words(plan: Plan, cluster: Cluster, graph: Graph | None = None) -> tuple[str, ...]:
    """The plan's sentences, the innermost axis first."""
    return tuple(_sentences(plan, cluster, graph))


def _sentences(plan: Plan, cluster: Cluster, graph: Graph | None) -> Iterator[str]:
    mesh = plan.mesh
    if plan.world == 1:
        yield "one device"
    if mesh.tp > 1:
        beside = ", with sequence parallel" if plan.sequence_parallel else ""
        yield f"{mesh.tp}-way tensor parallel {_where(plan, cluster, 'tp')}{beside}"
    if mesh.cp > 1:
        yield f"{mesh.cp}-way context parallel {_where(plan, cluster, 'cp')}, {CONTEXT_WORDS[plan.context]}"
    if mesh.dp > 1:
        yield f"{mesh.dp}-way data parallel {_where(plan, cluster, 'dp')}; {state_words(plan, cluster)}"
    elif plan.zero and mesh.cp > 1:
        yield state_words(plan, cluster)
    elif plan.zero:
        yield f"parameters are kept in fp32 and gathered in {plan.precision} by ZeRO {plan.zero} on each rank alone"
    if mesh.ep > 1:
        yield f"experts {mesh.ep}-way parallel {_where(plan, cluster, 'ep')}"
    if mesh.pp > 1:
        on_each = f", {plan.virtual} on each of {mesh.pp} ranks" if plan.virtual > 1 else ""
        yield f"{stage_words(plan, graph)}{on_each}, {_where(plan, cluster, 'pp')}; schedule {kind_of(plan.schedule).title}"
    yield batch_words(plan)
    yield recompute_words(plan, graph)
    if plan.offload.what != "none":
        yield offload_words(plan)
    yield _numbers(plan)


def place_words(group: Group, cluster: Cluster, world: int) -> str:
    """Where the ranks of a group lie."""
    devices, span = cluster.devices_per_host, group.size * group.stride
    if world <= devices:
        return "inside the host"
    if devices % span == 0:
        return "inside each host"
    if group.stride % devices == 0:
        return "across hosts"
    if devices % group.stride == 0 and group.size % (devices // group.stride) == 0:
        return f"across {span // devices} hosts, {devices // group.stride} ranks on each"
    return "unevenly across hosts"


def stage_words(plan: Plan, graph: Graph | None = None) -> str:
    """How many stages, and how many repeated blocks each holds; an embedding or head with a stage of its own is named."""
    counts = stage_counts(plan, graph)
    noun = f"{len(counts)} pipeline stages"
    first, last = (1 if any(counts) and counts[end] == 0 else 0 for end in (0, -1))
    inner = counts[first : len(counts) - last]
    if not first and not last:
        return f"{noun} {_shares(counts, 0)}"
    return f"{noun}: {', '.join(['the embedding'] * first + [f'{len(inner)} {_shares(inner, first)}'] + ['the head'] * last)}"


def _shares(counts: list[int], first: int) -> str:
    """Blocks of stages that stand in a row; first: the number of the first of them."""
    usual, times = Counter(counts).most_common(1)[0]
    if times == len(counts):
        return f"of {_blocks(usual)}"
    if len(counts) <= MOST_STAGES_LISTED:
        return f"of {_listed([str(count) for count in counts])} blocks"
    others = [f"stage {number} of {count}" for number, count in enumerate(counts, first) if count != usual]
    if len(others) <= 4:
        return f"of {_blocks(usual)} ({_listed(others)})"
    return f"of {min(counts)} to {max(counts)} blocks"


def stage_counts(plan: Plan, graph: Graph | None = None) -> list[int]:
    """Repeated blocks of each stage; without a graph, blocks that are items of a list."""
    repeated = None if graph is None else set(graph.repeated_blocks)
    return [
        sum(is_list_item(name) if repeated is None else name in repeated for name in expand_names(stage.blocks))
        for stage in plan.stages
    ]


def state_words(plan: Plan, cluster: Cluster) -> str:
    """What of the training state each rank holds."""
    if plan.zero == 0:
        return "parameters, gradients and optimizer state on every one"
    if plan.hybrid is None:
        return f"{SHARDED[plan.zero]} over {plan.shard_degree} (ZeRO {plan.zero})"
    group = Group(plan.hybrid, plan.mesh.tp * plan.mesh.cp)
    place = place_words(group, cluster, plan.world)
    return f"{SHARDED[plan.zero]} in groups of {plan.hybrid} {place} (hybrid ZeRO {plan.zero})"


def batch_words(plan: Plan) -> str:
    each = " on each data-parallel rank" if plan.mesh.dp > 1 else ""
    noun = "microbatch" if plan.num_microbatches == 1 else "microbatches"
    samples = "sample" if plan.microbatch == 1 else "samples"
    return (
        f"{plan.num_microbatches:,} {noun} of {plan.microbatch:,} {samples}{each}: global batch {plan.global_batch:,}"
    )


def recompute_words(plan: Plan, graph: Graph | None = None) -> str:
    """Which blocks redo their forward; all that may, in a word."""
    if not plan.recompute:
        return "nothing is recomputed"
    repeated = set(graph.repeated_blocks) if graph else {name for name in plan.blocks if is_list_item(name)}
    parts = []
    for mode in dict.fromkeys(rule.mode for rule in plan.recompute):
        names = plan.recomputed(mode)
        which = "all" if repeated and names == repeated else ", ".join(compact_names(_in_order(plan, names)))
        parts.append(f"{mode} recompute of {which}{' blocks' if which == 'all' else ''}")
    kept = len(repeated - frozenset().union(*(plan.recomputed(rule.mode) for rule in plan.recompute)))
    return "; ".join(parts) + (f"; {kept} blocks keep everything" if kept else "")


def offload_words(plan: Plan) -> str:
    offload = plan.offload
    if offload.what == "optimizer" and offload.share == 0:
        return _kept_words(plan)
    if offload.what == "optimizer" and offload.share == 0 and plan.stores_16_bits:
        return "parameters in 16 bits, their fp32 masters and optimizer state beside them on the device"
    what = "optimizer state" if offload.what == "optimizer" else "parameters and optimizer state"
    share = "" if offload.share == 1 else f"{offload.share:.0%} of "
    place = "the hosts' memory" if offload.where == "host" else "the hosts' disks"
    narrow = ", moments in bf16" if offload.moments == "bf16" else ""
    late = ", updated one step late" if offload.delayed else ""
    return f"{share}{what} in {place}{narrow}{late}{_streaming_words(plan)}"


def _kept_words(plan: Plan) -> str:
    """Nothing leaves the device; what is left of the offload is how parameters and their masters are kept there."""
    narrow = ", moments in bf16" if plan.offload.moments == "bf16" else ""
    if plan.stores_16_bits:
        return f"parameters in {plan.precision}, their masters and optimizer state beside them on the device{narrow}"
    return f"all optimizer state on the device{narrow}"


def _streaming_words(plan: Plan) -> str:
    if plan.offload.what != "parameters" or not_yet(plan):
        return ""
    waits = "the device" if plan.offload.stash == "device" else "the host"
    return f", streamed through a window of {_blocks(plan.offload.window)}; block inputs wait on {waits}"


def _numbers(plan: Plan) -> str:
    compiled = ", blocks compiled" if plan.compile else ""
    synced = ", batch norm over all data-parallel ranks" if plan.sync_batch_norm else ""
    return f"computes in {plan.precision}{compiled}{synced}"


def _where(plan: Plan, cluster: Cluster, axis: Axis) -> str:
    return place_words(axis_group(plan.mesh, axis), cluster, plan.world)


def _in_order(plan: Plan, names: frozenset[str]) -> list[str]:
    return [name for name in plan.blocks if name in names]


def _blocks(count: int) -> str:
    return f"{count} block" + ("" if count == 1 else "s")


def _listed(words: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
