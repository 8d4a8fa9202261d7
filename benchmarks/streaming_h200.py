"""Layer streaming on one GPU against the same model in memory with the same recompute.

    python benchmarks/streaming_h200.py [--depths 24,96,384] [--in-memory 24] [--microbatch 64] [--no-compile]

One JSON row a run: depth, way, milliseconds a step (median) and predicted, peak bytes the allocator held and predicted, what
streaming itself counts, host bytes, bytes over the link. Model: GPT, hidden 1024, 16 heads, sequence 512, batch 64, bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from large_pages import huge_page_bytes

from meshwright.capturing.capture import capture_source
from meshwright.core.cluster import Cluster
from meshwright.core.plan import Offload, Plan, Recompute, Stage
from meshwright.cost.estimate import estimate
from meshwright.measure.others import Others
from meshwright.models.source import ModelSource, resolve
from meshwright.runtime.apply import apply
from meshwright.runtime.deferred import building
from meshwright.runtime.offload.streamed_program import StreamedProgram

WARMUP = 2


def main() -> None:
    asked = arguments()
    _join()
    device = torch.device(asked.device)
    for depth in (int(text) for text in asked.in_memory.split(",") if text):
        print(json.dumps(run(depth, "in memory", asked, device)), flush=True)
    for depth in (int(text) for text in asked.depths.split(",") if text):
        print(json.dumps(run(depth, "streamed", asked, device)), flush=True)
    dist.destroy_process_group()


def run(depth: int, way: str, asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    name = f"gpt:layers={depth},hidden={asked.hidden},heads=16,seq={asked.seq},vocab={asked.vocab}"
    plan = plan_of(depth, way, asked)
    source = resolve(name)
    assert source.example is not None
    torch.manual_seed(0)
    started = time.perf_counter()
    with device, building(plan):
        module = source.build()
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    program = apply(module, plan, optimizer=optimizer, device=device)
    built = time.perf_counter() - started
    on_gpu = device.type == "cuda"
    batch = {key: value.pin_memory() if on_gpu else value for key, value in dict(source.example(asked.batch)).items()}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds, losses = [], []
    others = Others()
    for _ in range(WARMUP + asked.steps):
        _synchronise(device)
        before = time.perf_counter()
        losses.append(program.step(batch).loss)
        _synchronise(device)
        seconds.append(time.perf_counter() - before)
    row: dict[str, Any] = {
        "depth": depth,
        "way": way,
        "parameters": sum(one.numel() for one in program.module.parameters()),
        "ms_per_step": round(1e3 * statistics.median(seconds[WARMUP:]), 1),
        "ms_of_steps": [round(1e3 * one, 1) for one in seconds],
        **predicted(source, plan),
        "peak_device_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "reserved_device_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "build_seconds": round(built, 1),
        "losses": [round(loss, 4) for loss in losses],
        "torch": torch.__version__,
        "others_share": round(others.share(), 4),
        "huge_page_bytes": huge_page_bytes(),
    }
    if isinstance(program, StreamedProgram):
        link = program.streams.streaming.link
        row |= {"holdings": asdict(program.holdings()), "bytes_out": link.bytes_out, "bytes_in": link.bytes_in}
        program.close()
    del program, module
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return row


def predicted(source: ModelSource, plan: Plan) -> dict[str, Any]:
    graph = capture_source(source, plan.precision, plan.casting)
    found = estimate(graph, plan, Cluster.named("h200-single", hosts=1))
    return {
        "predicted_ms": round(1e3 * found.step_seconds, 1),
        "predicted_device_bytes": found.peak_bytes,
        "predicted_host_bytes": found.host_bytes,
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plan_of(depth: int, way: str, asked: argparse.Namespace) -> Plan:
    blocks = ("token_embedding", "position_embedding", f"blocks.0-{depth - 1}", "norm", "head")
    streamed = way == "streamed"
    microbatch = asked.microbatch if streamed else asked.in_memory_microbatch
    return Plan(
        model="gpt",
        stages=(Stage(coordinate=0, blocks=blocks),),
        recompute=(Recompute(mode="full", blocks=(f"blocks.0-{depth - 1}",)),),
        offload=Offload(what="parameters", stash=asked.stash, window=asked.window) if streamed else Offload(),
        microbatch=microbatch,
        num_microbatches=asked.batch // microbatch,
        global_batch=asked.batch,
        precision="bf16",
        compile=asked.compile,
    )


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """given: none for those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="24,96,384")
    parser.add_argument("--in-memory", default="24", help="depths that are also run in memory")
    parser.add_argument("--in-memory-microbatch", type=int, default=64)
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--stash", default="host", choices=("host", "device"))
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda:0", help="cpu: with small sizes, to see that it runs")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(given)


def _join() -> None:
    store = Path(tempfile.mkdtemp(), "store")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


if __name__ == "__main__":
    main()
