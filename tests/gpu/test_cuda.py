"""The same code on a GPU: one rank over NCCL, two ranks sharing the GPU over gloo."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from meshwright.capturing.capture import capture_source
from meshwright.core.plan import Plan
from meshwright.core.recipe import Recipe
from meshwright.core.request import PlanRequest
from meshwright.core.run.trace import Trace
from meshwright.cost.estimate import estimate
from meshwright.measure.probe import measure_cluster
from meshwright.measure.record import StepRecorder
from meshwright.models.moe import MoE, MoEOptions
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.launch import launch
from meshwright.runtime.ranks import Rank, joined
from meshwright.runtime.watch import SAMPLED_STEP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORKSPACE_BYTES = 64 * 2**20
"""cuBLAS takes memory of its own, before the step: it belongs to no category."""
MODEL = "gpt:layers=4,hidden=256,heads=4,seq=256,vocab=512"


def plan_for(model: str, world: int, **fixed: Any) -> Plan:
    return plain_plan(
        PlanRequest(global_batch=8 * world, microbatch=4, **fixed),
        capture_source(resolve(model).small(), "fp64"),
        world,
        "",
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parity_with_one_process(zero: int, num_ranks: int) -> None:
    plan = plan_for(MODEL, num_ranks, zero=zero, precision="fp64", recompute="full" if zero % 2 else "none")
    backend = "gloo" if num_ranks > 1 else "auto"
    payload = {"model": MODEL, "plan": msgspec.to_builtins(plan), "steps": 4, "device": "cuda", "backend": backend}
    result = launch("meshwright.measure.parity:parity_rank", payload, num_ranks)
    assert result["ok"], result["first_difference"]


OFFLOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "optimizer": (1, {"offload": "optimizer"}),
    "optimizer, ZeRO 2": (2, {"offload": "optimizer", "zero": 2}),
    "parameters": (1, {"offload": "parameters", "recompute": "full"}),
    "parameters, ZeRO 3": (2, {"offload": "parameters", "recompute": "full", "zero": 3}),
}


@pytest.mark.parametrize("kind", OFFLOADS)
def test_parity_of_offload(kind: str) -> None:
    num_ranks, asked = OFFLOADS[kind]
    plan = plan_for(MODEL, num_ranks, precision="fp64", **asked)
    backend = "gloo" if num_ranks > 1 else "auto"
    payload = {"model": MODEL, "plan": msgspec.to_builtins(plan), "steps": 4, "device": "cuda", "backend": backend}
    result = launch("meshwright.measure.parity:parity_rank", payload, num_ranks)
    assert result["ok"], result["first_difference"]


AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp by tokens, ZeRO 1": {"tp": 2, "sequence_parallel": True, "zero": 1},
    "cp": {"cp": 2},
    "cp, ZeRO 3": {"cp": 2, "zero": 3},
    "cp in a ring": {"cp": 2, "context": "ring"},
    "pp": {"pp": 2},
    "pp in halves": {"pp": 2, "schedule": "zb"},
    "pp twice round": {"pp": 2, "schedule": "interleaved"},
}
WIDE = "gpt:layers=4,hidden=32,heads=4,seq=16,vocab=2048"


@pytest.mark.parametrize("axis", AXES)
def test_parity_of_each_axis_over_two_ranks(axis: str) -> None:
    """Two ranks on one GPU, over gloo: correctness only."""
    plan = plan_for(WIDE, 2, precision="fp64", **AXES[axis])
    payload = {"model": WIDE, "plan": msgspec.to_builtins(plan), "steps": 3, "device": "cuda", "backend": "gloo"}
    result = launch("meshwright.measure.parity:parity_rank", payload, 2)
    assert result["ok"], result["first_difference"]


MIXTURE = "moe:layers=2,hidden=32,heads=4,seq=16,vocab=64,experts=4"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parity_of_experts_over_two_ranks(zero: int) -> None:
    plan = plan_for(MIXTURE, 2, zero=zero, ep=2, precision="fp64", recompute="full" if zero % 2 else "none")
    payload = {"model": MIXTURE, "plan": msgspec.to_builtins(plan), "steps": 4, "device": "cuda", "backend": "gloo"}
    result = launch("meshwright.measure.parity:parity_rank", payload, 2)
    assert result["ok"], result["first_difference"]


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("capacity", [0.0, 0.5])
def test_experts_in_one_product_and_one_after_another(top: int, capacity: float) -> None:
    """bf16: the same rounding of inputs, sums in another order."""
    torch.manual_seed(0)
    layer = MoE(MoEOptions(hidden=64, heads=4, experts=4, top=top, capacity=capacity)).to("cuda", torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 32, 64, device="cuda", dtype=torch.bfloat16)
    assert layer.experts.has_grouped_product(x.flatten(0, 1))
    grouped = outcome(layer, x)
    layer.experts.has_grouped_product = lambda _: False  # type: ignore[method-assign]
    for found, expected in zip(grouped, outcome(layer, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def outcome(layer: MoE, x: torch.Tensor) -> list[torch.Tensor]:
    """What a layer gives, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    made, _ = layer(x)
    made.float().square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [made.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 3])
def test_measured_memory_is_near_the_predicted(zero: int, precision: str) -> None:
    with joined("cuda") as rank:
        cluster = measure_cluster(rank)
        source = resolve(MODEL)
        graph = capture_source(source, precision)  # type: ignore[arg-type]
        plan = plain_plan(PlanRequest(global_batch=32, zero=zero, precision=precision), graph, 1, "")  # type: ignore[arg-type]
        program = apply(
            source.build(),
            plan,
            optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
            recorder=StepRecorder(),
            device=rank.device,
        )
        assert source.example is not None
        losses = [program.step(source.example(32)).loss for _ in range(5)]
        trace = program.trace()
    assert losses[-1] < losses[0]
    found = estimate(graph, plan, cluster, Recipe())
    assert trace.peak_bytes is not None
    # ZeRO computes in bf16 throughout, but is costed as the mix that replicas run: an upper bound
    assert found.peak_bytes == pytest.approx(trace.peak_bytes, rel=0.35 if zero and precision == "bf16" else 0.05)


@pytest.mark.parametrize(("zero", "recompute"), [(0, "none"), (0, "full"), (3, "full")])
def test_a_recorded_step(zero: int, recompute: str) -> None:
    """Time by part and stream and memory by category, of one rank on the GPU."""
    with joined("cuda") as rank:
        trace = recorded(rank, zero, recompute)
    parts = {(one.stream, one.part): one.seconds for one in trace.part_seconds}
    wanted = {"forward", "backward", "update"} | ({"recompute"} if recompute == "full" else set())
    assert {("compute", part) for part in wanted} <= set(parts)
    assert ("transfer", "host_to_device") in parts  # the batch
    busy = sum(seconds for (stream, _), seconds in parts.items() if stream == "compute")
    assert 0 < busy < 3 * trace.step_seconds
    points = trace.memory_over_time
    assert trace.memory_bytes is not None
    assert max(point.memory_bytes.total for point in points) == trace.memory_bytes.total == trace.peak_bytes
    assert min(trace.memory_bytes.activations, trace.memory_bytes.gradients, trace.memory_bytes.parameters) > 0
    assert (trace.memory_bytes.gathered_parameters > 0) == (zero == 3)
    assert max(point.memory_bytes.inputs for point in points) > 0
    assert trace.time_seconds.recompute > 0 or recompute == "none"


def recorded(rank: Rank, zero: int, recompute: str) -> Trace:
    """Four steps of four microbatches; the allocator's own peak of the third must be the recorder's."""
    gc.collect()
    before = torch.cuda.memory_allocated()  # what earlier tests left
    source = resolve(MODEL)
    request = PlanRequest(global_batch=32, microbatch=8, zero=zero, recompute=recompute)  # type: ignore[arg-type]
    plan = plain_plan(request, capture_source(source), 1, "")
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    program = apply(source.build(), plan, optimizer=optimizer, recorder=StepRecorder(), device=rank.device)
    assert source.example is not None
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        program.step(source.example(32))
        torch.cuda.synchronize()
        if step == SAMPLED_STEP:
            peak = torch.cuda.max_memory_allocated() - before
    trace = program.trace()
    assert trace.peak_bytes is not None
    assert 0.95 * peak - WORKSPACE_BYTES <= trace.peak_bytes <= peak
    return trace


def test_two_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo between two ranks that share the GPU: its collectives are in the timeline, with axis and bytes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    rows = launch("test_cuda:recorded_collectives", {}, 2)
    assert {row[0] for row in rows} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(axis == "dp" and num_bytes > 0 for _, axis, num_bytes in rows)


def recorded_collectives(payload: dict[str, Any]) -> list[Any]:
    with joined("cuda", "gloo") as rank:
        source = resolve(MODEL)
        graph = capture_source(source)
        plan = plain_plan(PlanRequest(global_batch=8, zero=3), graph, rank.num_ranks, "")
        optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
        program = apply(source.build(), plan, optimizer=optimizer, recorder=StepRecorder(), device=rank.device)
        assert source.example is not None
        for _ in range(4):
            program.step(source.example(8))
        found = [one for one in program.trace().timeline if one.stream == "communication"]
        return [(one.part, one.axis, one.num_bytes) for one in found]
