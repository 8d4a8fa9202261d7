"""A small model and small machines with round figures, for the tests of cost and search. No torch."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from strategies import degrees

from meshwright.core.cluster import Cluster, Device, Link, Rate
from meshwright.core.constants import Constants
from meshwright.core.graph import (
    Affine,
    Block,
    Graph,
    Kind,
    MemoryEvent,
    Op,
    OpKind,
    Parameter,
    Pass,
    Phase,
    Precision,
    Segment,
    Shape,
)
from meshwright.core.plan import Mesh, Plan, Recompute, Stage
from meshwright.core.request import PlanRequest
from meshwright.rules.plain_plan import plain_plan

KEPT, OUTPUT, PEAK = 1000.0, 100.0, 50.0
"""Bytes per sample that each block of a chain keeps for backward, hands on, and needs for a moment on top."""


def chain_graph(num_blocks: int = 4, shape: tuple[int, ...] = (8, 8), outside: tuple[int, ...] | None = None) -> Graph:
    """Like blocks in a row, one matrix each; backward does twice the work of forward, half of it for the weight.

    outside: a matrix in no block.
    """
    names = [f"blocks.{i}" for i in range(num_blocks)]
    parameters = [Parameter(name=f"{name}.weight", shape=shape, dtype="float32", block=name) for name in names]
    if outside:
        parameters.insert(0, Parameter(name="embed", shape=outside, dtype="float32"))
    around = (Pass(phase="forward"), Pass(phase="backward")) if outside else ()
    return Graph(
        model="chain",
        parameters=tuple(parameters),
        kinds=(Kind(name="Chain", ops=(), passes=around), chain_kind()),
        blocks=(
            Block(name="", kind="Chain", repeated=False),
            *(Block(name=name, kind="Block", repeated=True) for name in names),
        ),
        timeline=(
            *([Segment("", 0)] if outside else []),
            *(Segment(name, 0) for name in names),
            *(Segment(name, 1) for name in reversed(names)),
            *([Segment("", 1)] if outside else []),
        ),
        buffer_bytes=0,
        batch_bytes=Affine(0.0, 64.0),
        tokens_per_sample=16,
    )


def chain_kind() -> Kind:
    kept, room = Affine(0.0, KEPT), Affine(0.0, PEAK)
    given, vacated = Affine(0.0, -KEPT), Affine(0.0, -PEAK)
    tokens, weight = (Affine(0.0, 1.0), Affine(8.0, 0.0)), (Affine(8.0, 0.0), Affine(8.0, 0.0))
    return Kind(
        name="Block",
        ops=(
            matmul("forward", 1e6, tokens, "@input"),
            matmul("backward", 1e6, tokens, "@input"),
            matmul("backward", 1e6, weight, "@input"),
        ),
        passes=(
            Pass(
                phase="forward",
                num_ops=1,
                events=(MemoryEvent(0, kept), MemoryEvent(0, room), MemoryEvent(0, vacated)),
                output_bytes=Affine(0.0, OUTPUT),
            ),
            Pass(
                phase="backward",
                first_op=1,
                num_ops=2,
                events=(MemoryEvent(1, room), MemoryEvent(1, vacated), MemoryEvent(0, given)),
            ),
        ),
    )


def captured_in(precision: Precision, graph: Graph) -> Graph:
    """The same graph as if every op ran in this precision."""
    kinds = tuple(
        msgspec.structs.replace(k, ops=tuple(msgspec.structs.replace(op, dtype=precision) for op in k.ops))
        for k in graph.kinds
    )
    return msgspec.structs.replace(graph, precision=precision, kinds=kinds)


def matmul(phase: Phase, flops_per_sample: float, result: Shape, *inputs: int | str) -> Op:
    return Op(
        name="mm",
        kind="matmul",
        phase=phase,
        inputs=inputs,
        input_shapes=tuple(result for _ in inputs),
        result_shape=result,
        flops=Affine(0.0, flops_per_sample),
    )


def machine(
    num_devices: int = 4,
    *,
    hosts: int = 1,
    bytes_per_second: float = 1e9,
    latency_seconds: float = 1e-6,
    outer_bytes_per_second: float | None = None,
    **device: Any,
) -> Cluster:
    """`num_devices` a host. A matmul runs at 1e9 flops/s, memory at 1e9 bytes/s; a kernel takes 1 ns at least.

    The link between hosts is as fast as the one inside, unless said otherwise.
    """
    outer = bytes_per_second if outer_bytes_per_second is None else outer_bytes_per_second
    return Cluster(
        name="machine",
        origin="assumed",
        num_hosts=hosts,
        devices_per_host=num_devices,
        device=msgspec.structs.replace(DEVICE, **device),
        intra_host=Link(bytes_per_second=bytes_per_second, latency_seconds=latency_seconds, origin="assumed"),
        inter_host=Link(bytes_per_second=outer, latency_seconds=latency_seconds, origin="assumed"),
    )


DEVICE = Device(
    name="round",
    kind="cuda",
    memory_bytes=10**9,
    rates=tuple(
        Rate(kind=kind, dtype=dtype, size=1.0, per_second=1e9)
        for kind in get_args(OpKind)
        for dtype in ("fp32", "bf16", "fp16")
    ),
    launch_seconds=1e-9,
    peak_flops_per_second=1e9,
)


def measured(cluster: Cluster, speeds: dict[float, float]) -> Cluster:
    """The machine with rates that differ by size: size → how many times as fast ops of it run."""
    rates = tuple(
        msgspec.structs.replace(rate, size=size, per_second=speed * rate.per_second)
        for rate in cluster.device.rates
        for size, speed in sorted(speeds.items())
    )
    return msgspec.structs.replace(cluster, device=msgspec.structs.replace(cluster.device, rates=rates))


def named_machine(num_devices: int = 8, hosts: int = 1, **constants: Any) -> Cluster:
    """A device that was not probed: 1e15 flops/s, 1e12 bytes/s of memory, links of 1e11 and 1e10 bytes/s."""
    known = Constants(**constants)
    device = Device(
        name="sheet",
        kind="cuda",
        memory_bytes=10**12,
        rates=(),
        launch_seconds=known.launch_seconds,
        backward_launch_seconds=known.backward_launch_seconds,
        peak_flops_per_second=1e15,
        peaks={"fp16": 1e15, "bf16": 1e15, "fp32": 5e14},
        bytes_per_second=1e12,
        constants=known,
    )
    return Cluster(
        name="sheet",
        origin="vendor sheet",
        num_hosts=hosts,
        devices_per_host=num_devices,
        device=device,
        intra_host=Link(bytes_per_second=1e11, origin="vendor sheet"),
        inter_host=Link(bytes_per_second=1e10, origin="vendor sheet"),
        host_link=Link(bytes_per_second=1e10, origin="vendor sheet"),
    )


def flat_plan(graph: Graph, dp: int = 1, *, microbatch: int = 1, num_microbatches: int = 1, **changes: Any) -> Plan:
    """One stage of all blocks, on dp ranks; `recompute="full"` for all of its repeated blocks."""
    if changes.get("recompute") in ("full", "selective"):
        changes["recompute"] = (Recompute(mode=changes["recompute"], blocks=graph.repeated_blocks),)
    return Plan(
        mesh=Mesh(dp=dp),
        stages=(Stage(coordinate=0, blocks=tuple(block.name for block in graph.blocks if block.name)),),
        microbatch=microbatch,
        num_microbatches=num_microbatches,
        global_batch=microbatch * num_microbatches * dp,
        **{"precision": graph.precision, **changes},
    )


def plan_for(graph: Graph, **request: Any) -> Plan:
    """What the plan flags of these names give; as many ranks as the degrees need."""
    wish = PlanRequest(**request)
    world = (wish.dp or 1) * (wish.tp or 1) * (wish.pp or 1) * (wish.cp or 1)
    return plain_plan(wish, graph, world, "")


graphs = st.builds(
    chain_graph,
    st.integers(1, 3),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.none() | st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
bandwidths = st.floats(1e3, 1e12)
machines = st.builds(
    machine,
    st.sampled_from([1, 2, 4]),
    bytes_per_second=bandwidths,
    latency_seconds=st.floats(1e-9, 1e-2),
    overlap_share=st.floats(0, 1),
    kind=st.sampled_from(["cpu", "cuda"]),
)


measured_machines = st.builds(
    measured,
    st.builds(
        machine,
        st.sampled_from([1, 2, 4]),
        bytes_per_second=bandwidths,
        latency_seconds=st.floats(1e-9, 1e-2),
        launch_seconds=st.floats(1e-9, 1e-1),
        kind=st.sampled_from(["cpu", "cuda"]),
    ),
    st.fixed_dictionaries(dict.fromkeys((1e5, 1e6, 1e7, 1e8), st.floats(0.2, 5.0))),
)
"""Whose rates rise and fall with the size, as those of a probed one may, and whose kernels may take long to start."""


plans_of = st.builds(
    lambda graph, dp, zero, m, size, recompute: (
        graph,
        flat_plan(graph, dp, zero=zero, num_microbatches=m, microbatch=size, recompute=recompute),
    ),
    graphs,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2, 3]),
    degrees,
    degrees,
    st.sampled_from([(), "full"]),
)
"""Graphs with a data-parallel plan of each."""
