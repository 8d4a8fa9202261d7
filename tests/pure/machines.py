"""A small model and a small machine with round figures, for the tests of cost and search. No torch."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from meshwright.core.cluster import Cluster, Device, Link, Rate
from meshwright.core.graph import Affine, Block, Graph, Kind, Op, OpKind, Parameter, Phase, Precision, Segment
from meshwright.core.plan import Mesh, Plan, Recompute, Stage

KEPT, OUTPUT, PEAK = 1000.0, 100.0, 50.0
"""Bytes per sample that each block of a chain keeps for backward, hands on, and needs for a moment."""


def chain_graph(num_blocks: int = 4, shape: tuple[int, ...] = (8, 8), outside: tuple[int, ...] | None = None) -> Graph:
    """Like blocks in a row, one matrix each; backward does twice the work of forward. `outside`: a matrix in no block."""
    names = [f"blocks.{i}" for i in range(num_blocks)]
    parameters = [Parameter(name=f"{name}.weight", shape=shape, dtype="float32", block=name) for name in names]
    if outside:
        parameters.insert(0, Parameter(name="embed", shape=outside, dtype="float32"))
    return Graph(
        model="chain",
        parameters=tuple(parameters),
        kinds=(Kind(name="Chain", ops=()), Kind(name="Block", ops=(matmul("forward", 1e6), matmul("backward", 2e6)))),
        blocks=(
            Block(name="", kind="Chain", repeated=False),
            *(Block(name=name, kind="Block", repeated=True) for name in names),
        ),
        timeline=(
            *(segment("forward", name, KEPT) for name in names),
            *(segment("backward", name, -KEPT) for name in reversed(names)),
            *([segment("backward", "", 0.0)] if outside else []),
        ),
        buffer_bytes=0,
        batch_bytes=Affine(0.0, 64.0),
        tokens_per_sample=16,
    )


def captured_in(precision: Precision, graph: Graph) -> Graph:
    """The same graph as if every op ran in this precision."""
    kinds = tuple(
        msgspec.structs.replace(k, ops=tuple(msgspec.structs.replace(op, dtype=precision) for op in k.ops))
        for k in graph.kinds
    )
    return msgspec.structs.replace(graph, precision=precision, kinds=kinds)


def matmul(phase: Phase, flops_per_sample: float) -> Op:
    nothing = Affine(0.0, 0.0)
    return Op(
        name="mm",
        kind="matmul",
        phase=phase,
        count=1,
        flops=Affine(0.0, flops_per_sample),
        read_bytes=nothing,
        written_bytes=nothing,
    )


def segment(phase: Phase, block: str, kept: float) -> Segment:
    return Segment(
        phase=phase,
        block=block,
        kept_bytes=Affine(0.0, kept),
        peak_bytes=(Affine(0.0, PEAK),),
        output_bytes=Affine(0.0, OUTPUT),
    )


def machine(
    num_devices: int = 4, *, bytes_per_second: float = 1e9, latency_seconds: float = 1e-6, **device: Any
) -> Cluster:
    """One host. A matmul runs at 1e9 flops/s, memory at 1e9 bytes/s; a kernel takes 1 ns at least."""
    return Cluster(
        name="machine",
        origin="assumed",
        devices_per_host=num_devices,
        device=msgspec.structs.replace(DEVICE, **device),
        intra_host=Link(bytes_per_second=bytes_per_second, latency_seconds=latency_seconds, origin="assumed"),
    )


DEVICE = Device(
    name="round",
    kind="cuda",
    memory_bytes=10**9,
    rates=tuple(
        Rate(kind=kind, dtype=dtype, size=1.0, per_second=1e9)
        for kind in get_args(OpKind)
        for dtype in ("fp32", "bf16")
    ),
    launch_seconds=1e-9,
    peak_flops_per_second=1e9,
)


def flat_plan(graph: Graph, dp: int = 1, *, microbatch: int = 1, num_microbatches: int = 1, **changes: Any) -> Plan:
    """One stage of all blocks, on dp ranks; `recompute="full"` for all of its blocks."""
    names = graph.repeated_blocks
    if changes.get("recompute") == "full":
        changes["recompute"] = (Recompute(mode="full", blocks=names),)
    return Plan(
        mesh=Mesh(dp=dp),
        stages=(Stage(coordinate=0, blocks=names),),
        microbatch=microbatch,
        num_microbatches=num_microbatches,
        global_batch=microbatch * num_microbatches * dp,
        **changes,
    )


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
