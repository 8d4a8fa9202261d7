"""The recorder's parts on made-up profiles: a GPU's trace as kineto writes it, allocations, memory over time, samples."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.estimate import MemoryParts, TimeParts
from meshwright.core.run.trace import MemoryPoint
from meshwright.measure.allocations import Allocation, over_time, pair, peak
from meshwright.measure.categories import Categories
from meshwright.measure.intervals import Timeline
from meshwright.measure.profile import Change, Profile, Span, parse
from meshwright.measure.unseen import end_unseen
from meshwright.rules.downsampling import downsampled
from meshwright.runtime import watch as watch_module
from meshwright.runtime.step import StepOutput, divided
from meshwright.runtime.watch import SAMPLED_STEP, SHARE, Watch, stride

HOST, AUTOGRAD, COMPUTE, COMMUNICATION = 100, 101, 7, 20


def range_event(name: str, start: float, end: float, thread: int = HOST) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "tid": thread, "ts": 1000 + start, "dur": end - start}


def launched(name: str, at: float, start: float, end: float, stream: int = COMPUTE, **more: Any) -> list[Any]:
    """A host call and the kernel or copy it launches; the correlation number joins them."""
    number = int(10 * at)
    copies = name.startswith("Memcpy")
    call = {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync" if copies else "cudaLaunchKernel", "tid": HOST,
        "ts": 1000 + at, "dur": 1, "args": {"correlation": number, "cbid": 211},
    }  # fmt: skip
    work = {
        "ph": "X", "cat": "gpu_memcpy" if copies else "kernel", "name": name, "pid": 0, "tid": stream,
        "ts": 1000 + start, "dur": end - start,
        "args": {"device": 0, "stream": stream, "correlation": number, "External id": 3, **more},
    }  # fmt: skip
    return [call, work]


def memory_event(at: float, address: int, num_bytes: int, device_type: int = 1) -> dict[str, Any]:
    arguments = {"Device Type": device_type, "Device Id": 0, "Addr": address, "Bytes": num_bytes, "Total Allocated": 0}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": HOST, "ts": 1000 + at, "args": arguments}


def gpu_profile() -> Profile:
    """Microseconds: a batch is copied in, forward and backward are launched far ahead, an all-reduce is waited for."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
        range_event("meshwright/step", 0, 1000),
        range_event("meshwright/forward", 10, 50),
        range_event("meshwright/backward", 60, 100),
        range_event("meshwright/recompute", 62, 70, AUTOGRAD),
        range_event("meshwright/update", 110, 120),
        range_event("meshwright/call/all_reduce/dp/4096", 90, 92),
        range_event("meshwright/note/gradients/64", 95, 96),
        range_event("nccl:all_reduce", 90, 91),
        *launched("Memcpy HtoD (Pageable -> Device)", 5, 6, 9, bytes=512),
        *launched("ampere_sgemm_128x64_tn", 12, 100, 200),
        *launched("void gelu_kernel", 20, 205, 300),
        *launched("ampere_sgemm_128x64_tn", 65, 400, 480),
        *launched("ampere_sgemm_128x64_nt", 80, 480, 600),
        *launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 91, 550, 900, COMMUNICATION),
        *launched("multi_tensor_apply_kernel", 115, 905, 990),
        {"ph": "X", "cat": "gpu_user_annotation", "name": "meshwright/forward", "tid": COMPUTE, "ts": 1100, "dur": 200},
        memory_event(15, 32, 1000), memory_event(16, 40, 8), memory_event(17, 40, -8), memory_event(66, 48, 300),
        memory_event(75, 48, -300), memory_event(82, 64, 4096), memory_event(85, 32, -1000), memory_event(85, 7, 99, 0),
    ]  # fmt: skip
    return parse(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode(), "cuda")


def test_a_gpus_compute_stream() -> None:
    """Kernels count for the region they were launched in; the pause that the all-reduce ends is a wait."""
    timeline = Timeline(gpu_profile())
    seconds = {one.part: one.seconds for one in timeline.part_seconds() if one.stream == "compute"}
    assert seconds == pytest.approx(
        {"forward": 195e-6, "recompute": 80e-6, "backward": 120e-6, "waiting": 300e-6, "update": 85e-6}
    )
    parts = TimeParts(forward=195e-6, recompute=80e-6, backward=120e-6, update=85e-6, exposed_reduce=300e-6)
    assert timeline.time_parts().total == pytest.approx(parts.total)
    assert timeline.time_parts().exposed_reduce == pytest.approx(parts.exposed_reduce)
    drawn = [one for one in timeline.intervals() if one.stream == "compute"]
    assert [one.part for one in drawn] == ["forward", "recompute", "backward", "waiting", "update"]


def test_a_gpus_other_streams() -> None:
    others = [one for one in Timeline(gpu_profile()).intervals() if one.stream != "compute"]
    copied, reduced = others
    assert (copied.stream, copied.part, copied.num_bytes) == ("transfer", "host_to_device", 512)
    assert (reduced.stream, reduced.part, reduced.axis, reduced.num_bytes) == (
        "communication",
        "all_reduce",
        "dp",
        4096,
    )
    assert (reduced.start_seconds, reduced.seconds) == pytest.approx((550e-6, 350e-6))


def test_a_gpus_memory() -> None:
    """One activation, one temporary, one that recompute made and dropped, one gradient; host memory is not counted."""
    profile = gpu_profile()
    found = {one.address: Categories(profile, pair(profile.changes)).of(one) for one in pair(profile.changes)}
    assert found == {32: "activations", 40: "temporaries", 48: "activations", 64: "gradients"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_all"),
    ],
)
def test_names_of_nccls_kernels(name: str, kind: str) -> None:
    events = [range_event("meshwright/step", 0, 10), *launched(name, 1, 2, 3, COMMUNICATION)]
    timeline = Timeline(parse(json.dumps({"traceEvents": events}).encode(), "cuda"))
    assert [(one.kind, one.axis) for one in timeline.collectives] == [(kind, None)]


# A CPU's profile


def host_profile(**parts: Any) -> Profile:
    empty: dict[str, Any] = dict.fromkeys(
        ("regions", "notes", "calls", "annotations", "ops", "device_work", "changes"), ()
    )
    return Profile(**{"seconds": 10.0, **empty, **parts})


def span(name: str, start: float, end: float, thread: Any = HOST) -> Span:
    return Span(name, start, end, start, thread)


def test_a_wait_ends_when_the_collective_does() -> None:
    """Gloo runs from 2 to 6. Python alone, from 2.5 to 3, is no wait: the collective is not done when it goes on."""
    profile = host_profile(
        regions=(span("forward", 0, 9),),
        calls=(span("all_gather/dp/64", 1.5, 1.6),),
        annotations=(span("gloo:all_gather", 2, 6, thread=1),),
        ops=(
            span("aten::mm", 0, 2.5),
            span("aten::mm", 3, 4),
            span("c10d::_allgather_base_", 4, 6),
            span("aten::mm", 6, 9),
        ),
    )
    timeline = Timeline(profile)
    assert [(one.part, one.start, one.end) for one in timeline.compute] == [
        ("forward", 0, 4), ("waiting", 4, 6), ("forward", 6, 9), ("other", 9, 10),
    ]  # fmt: skip
    assert timeline.time_parts() == TimeParts(forward=7, exposed_gather=2)


def test_gloo_reduces_all_to_scatter() -> None:
    profile = host_profile(
        calls=(span("all_reduce/tp/8", 0, 1), span("reduce_scatter/dp/64", 2, 3)),
        annotations=(span("gloo:all_reduce", 0.5, 1, thread=1), span("gloo:all_reduce", 2.5, 4, thread=2)),
    )
    found = [(one.kind, one.axis, one.num_bytes) for one in Timeline(profile).collectives]
    assert found == [("all_reduce", "tp", 8), ("reduce_scatter", "dp", 64)]


# Memory


def change(at: float, address: int, num_bytes: int, thread: int = HOST) -> Change:
    return Change(at, address, num_bytes, thread)


def test_births_are_paired_with_deaths() -> None:
    """Address 2 dies unseen before 3 is over; address 9 was held before the step; address 1 outlives it."""
    changes = [change(0, 1, 8), change(1, 2, 16), change(2, 9, -4), change(3, 2, 32), change(4, 2, -32)]
    assert pair(changes) == [
        Allocation(1, 8, 0, float("inf"), HOST, death_seen=False),
        Allocation(2, 16, 1, 3, HOST, death_seen=False),
        Allocation(2, 32, 3, 4, HOST),
    ]


def test_what_dies_unseen_is_ended_when_it_is_of_no_more_use() -> None:
    profile = host_profile(
        regions=(span("forward", 0, 4), span("backward", 5, 9)),
        annotations=(
            span("FSDP::all_gather (a)", 0, 1), span("FSDP::all_gather_copy_out (a)", 1, 2),
            span("FSDP::all_gather (b)", 2, 3), span("FSDP::all_gather_copy_out (b)", 3, 3.5),
            span("FSDP::all_gather (a)", 5, 6), span("FSDP::all_gather_copy_out (a)", 6, 6.5),
            span("FSDP::post_backward_reduce (b)", 6.5, 7), span("gloo:all_reduce", 6.6, 6.9, thread=1),
            span("FSDP::post_backward_rs_wait (a)", 8, 8.1),
        ),
    )  # fmt: skip
    lost = [Allocation(1, 8, at, float("inf"), HOST, death_seen=False) for at in (0.5, 5.5, 6.7)]
    copied = Allocation(2, 8, 6.7, float("inf"), 1, death_seen=False)
    seen = Allocation(3, 8, 0.5, 9.0, HOST)
    assert [one.died for one in end_unseen([*lost, copied, seen], profile)] == [3.5, 6.5, 8.1, 6.9, 9.0]


def test_categories_of_sharded_modules() -> None:
    profile = host_profile(
        regions=(span("forward", 0, 4), span("backward", 5, 9)),
        annotations=(
            span("FSDP::pre_forward (a)", 0, 2), span("FSDP::all_gather (a)", 0, 1),
            span("FSDP::post_backward_accumulate (a)", 6, 7), span("FSDP::post_backward_reduce (a)", 7, 8),
        ),
        notes=(span("gathered_parameters/5", 3, 3), span("gradients/5", 8, 8)),
    )  # fmt: skip
    born = {0.5: "communication_buffers", 1.5: "gathered_parameters", 6.5: "gradients", 7.5: "communication_buffers"}
    allocations = [Allocation(1, 8, at, 9.5) for at in born]
    noted = [Allocation(5, 8, 2.5, 3.5), Allocation(5, 8, 7.5, 9.5)]  # the same address, one after the other
    categories = Categories(profile, [*allocations, *noted])
    assert [categories.of(one) for one in allocations] == list(born.values())
    assert [categories.of(one) for one in noted] == ["gathered_parameters", "gradients"]


def test_what_is_kept_for_the_weights_is_an_activation() -> None:
    """A zero-bubble schedule makes the gradients of inputs first; what it keeps for those of weights dies with them."""
    profile = host_profile(
        regions=(span("backward", 0, 2), span("forward", 2, 3), span("backward", 3, 5)),
        weights=(span("weights", 3, 5),),
    )
    kept, sent = Allocation(1, 8, 1.0, 4.0), Allocation(2, 8, 1.0, 2.5)
    assert [Categories(profile, [kept, sent]).of(one) for one in (kept, sent)] == ["activations", "temporaries"]
    plain = host_profile(regions=profile.regions)
    assert Categories(plain, [kept]).of(kept) == "temporaries"


def test_what_was_passed_to_a_collective_ends_with_it_where_its_death_is_not_seen() -> None:
    """Gloo's thread dropped it last. Had the step's thread held it longer, the profiler would have seen it die."""
    profile = host_profile(
        calls=(span("all_reduce/tp/8", 1, 1.1), span("all_gather/tp/8", 5, 5.1)),
        annotations=(span("gloo:all_reduce", 1.2, 2, thread=1), span("gloo:all_gather", 5.2, 6, thread=1)),
        notes=(span("passed/7", 1.05, 1.06), span("passed/7", 5.05, 5.06)),
    )
    lost, reused = (Allocation(7, 8, 0.5, died, HOST, death_seen=False) for died in (float("inf"), 3.0))
    seen, other = Allocation(7, 8, 0.5, 9.0, HOST), Allocation(3, 8, 0.5, 9.0, HOST, death_seen=False)
    assert [one.died for one in end_unseen([lost, reused, seen, other], profile)] == [6.0, 2.0, 9.0, 9.0]


sizes = st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=60)


@given(sizes, st.integers(4, 30))
def test_few_points_keep_the_peak(sizes: list[tuple[int, float, float]], most: int) -> None:
    found = [
        (Allocation(number, num_bytes, min(one, other), max(one, other)), "temporaries")
        for number, (num_bytes, one, other) in enumerate(sizes)
    ]
    points = over_time(MemoryParts(parameters=7), found, end=10.0)
    kept = downsampled(points, most)
    assert len(kept) <= most
    assert peak(kept).memory_bytes == peak(points).memory_bytes
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert all(isinstance(point, MemoryPoint) for point in kept)


# Samples


def test_a_sample_is_paid_back_before_the_next() -> None:
    assert stride(cost_seconds=3.0, plain_seconds=0.6) == 334
    assert stride(cost_seconds=-0.1, plain_seconds=0.6) == 1
    assert 3.0 / (stride(3.0, 0.61) * 0.61) <= SHARE


class SlowToRecord:
    """A recorder that takes far longer than the step it watches."""

    def record(self, program: Any, batch: Any, run: Any) -> Any:
        time.sleep(0.05)
        return SimpleNamespace(seconds=0.001, sampled=False), SimpleNamespace()


def test_a_plain_step_that_was_slow_by_chance_does_not_make_recording_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were its cost what a sample took beyond that step, it would be nothing, and every step would be sampled."""
    monkeypatch.setattr(watch_module, "_slowest_rank", lambda steps, device: steps)
    watch = Watch(SlowToRecord())
    earlier: list[Any] = [SimpleNamespace(seconds=1.0, sampled=False) for _ in range(2)]
    program: Any = SimpleNamespace(device=torch.device("cpu"))
    watch.record(program, {}, lambda: cast(StepOutput, None), earlier)
    assert watch.next_step >= SAMPLED_STEP + stride(0.049, 1.0)


def test_a_plain_steps_parts_are_divided_as_in_the_sampled_step() -> None:
    sampled = TimeParts(forward=3, exposed_gather=1, recompute=2, backward=5, exposed_reduce=1, update=1)
    plain = TimeParts(forward=2, backward=4, update=0.5)
    assert divided(plain, sampled) == TimeParts(
        forward=1.5, exposed_gather=0.5, recompute=1, backward=2.5, exposed_reduce=0.5, update=0.5
    )
    assert divided(plain, TimeParts()) == plain


def test_work_done_while_a_send_is_under_way_is_not_the_send_s() -> None:
    """Gloo's range lasts from the send to the wait for it, on the thread that goes on with the next microbatch."""
    profile = host_profile(
        regions=(span("forward", 0, 1), span("forward", 2, 4)), annotations=(span("gloo:send", 1, 5),)
    )
    kept = Allocation(1, 8, 3.0, 9.0, HOST)
    assert end_unseen([kept], profile) == [kept]
    assert Categories(profile, [kept]).of(kept) == "activations"
