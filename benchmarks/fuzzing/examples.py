"""Valid examples of every format: what mutations start from. Made once, into a folder that every child copies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from fuzzing import readers
from fuzzing.limits import wait_for
from fuzzing.readers import CLUSTER, MODEL, graph, program_and_rank
from meshwright.core.cluster import Cluster, CollectiveTime, Rate, catalogue
from meshwright.core.estimate import MemoryParts, TimeParts
from meshwright.core.graph import OpKind
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.core.run.trace import Interval, MemoryPoint, PartSeconds, StepRecord, Trace
from meshwright.cost.estimate import estimate
from meshwright.cost.forecast import forecast
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.training.checkpoint import Progress, save
from meshwright.training.settings import CheckpointSettings, Settings

ASSETS = Path(__file__).parent.parent.parent / "tests" / "assets"
CONFIGS = ("llama-tiny", "gpt2-tiny", "bert-tiny", "mixtral-tiny", "t5-tiny", "vit-tiny")
NAMES = (
    "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32,mlp=2,dropout=0.1,tied=true,attention=eager",
    "llama:layers=2,hidden=16,heads=4,kv_heads=2,intermediate=32,seq=8,vocab=32",
    "bert:layers=2,hidden=16,heads=2,seq=8,vocab=32",
    "t5:layers=1,hidden=16,heads=2,head_width=8,intermediate=32,seq=8,vocab=32",
    "vit:layers=2,hidden=16,heads=2,image=16,patch=4,classes=3",
    "moe:layers=2,hidden=16,heads=2,seq=8,vocab=32,experts=2",
    "mlp:layers=2,inputs=8,hidden=16,classes=3",
    "coatnet:blocks=1-1-1-1-1,channels=8-8-16-32-64,head_width=8,image=32,classes=3",
)
REQUESTS = (
    PlanRequest(dp=2, pp=2, virtual=2, schedule="interleaved", microbatch=1, global_batch=8),
    PlanRequest(tp=2, dp=2, zero=2, global_batch=8, sequence_parallel=True),
    PlanRequest(dp=4, zero=3, hybrid=2, recompute="every:2", global_batch=8, precision="fp32"),
    PlanRequest(pp=4, schedule="zb", microbatch=1, global_batch=8, recompute="selective"),
    PlanRequest(offload="optimizer", offload_share=0.5, global_batch=4),
)
STEPS = 20


@dataclass(frozen=True)
class Example:
    """A valid input, and what reads it."""

    file: str
    """Where it lies, in the folder of all of them. Its ending tells its form."""
    read: Callable[[Path], None]


def make_examples(folder: Path) -> dict[str, tuple[Example, ...]]:
    """Format → its examples. All files are written below the folder."""
    plans = _plans(folder)
    _run_folder(folder / "run", plans[0])
    _in_child(lambda: _checkpoint(folder / "checkpoints"))
    step = "checkpoints/step-00000002"
    return {
        "plans": tuple(_each(folder, "plan-*", readers.read_plan)),
        "settings": (*_settings(folder), *_foreign(folder)),
        "clusters": _clusters(folder),
        "checkpoints": tuple(
            Example(f"{step}/{name}", readers.read_checkpoint)
            for name in ("manifest.json", "progress.json", "contents.json")
        ),
        "metrics": (Example("run/metrics.jsonl", readers.read_metrics_of_run),),
        "traces": tuple(
            Example(f"run/{name}", readers.read_run_folder)
            for name in ("trace.json", "traces/rank-00000.json", "estimate.json", "forecast.json", "cluster.json")
        ),
        "models": (*_configs(folder), *_names(folder)),
    }


def _each(folder: Path, pattern: str, read: Callable[[Path], None]) -> list[Example]:
    return [Example(path.name, read) for path in sorted(folder.glob(pattern))]


def _plans(folder: Path) -> list[Plan]:
    worlds = [4, 4, 4, 4, 1]
    found = [
        msgspec.structs.replace(plain_plan(request, graph(), world, ""), graph="")
        for request, world in zip(REQUESTS, worlds, strict=True)
    ]
    for number, plan in enumerate(found):
        plan.save(folder / f"plan-{number}.json")
        plan.save(folder / f"plan-{number}.toml")
    return found


def _settings(folder: Path) -> list[Example]:
    Settings(model=MODEL, cluster=CLUSTER, plan=PlanRequest(global_batch=8)).save(folder / "settings-plain.toml")
    searched = Settings(
        model=MODEL,
        planner="search",
        nproc=2,
        plan=PlanRequest(global_batch=8, tp=1, pp=1),
        checkpoint=CheckpointSettings(every=5),
    )
    searched.save(folder / "settings-searched.toml")
    given = Settings(model=MODEL, plan_file="plan-1.json", cluster="cluster.json")
    given.save(folder / "settings-given.toml")
    return _each(folder, "settings-*", readers.read_run_settings)


def _foreign(folder: Path) -> list[Example]:
    for path in (ASSETS / "configs").iterdir():
        shutil.copy(path, folder)
    patterns = ("deepspeed-*.json", "accelerate-*.yaml")
    return [example for pattern in patterns for example in _each(folder, pattern, readers.read_foreign)]


def _clusters(folder: Path) -> tuple[Example, ...]:
    named = Cluster.named(CLUSTER)
    named.save(folder / "cluster-named.json")
    named.save(folder / "cluster-named.toml")
    probed = _probed(named)
    probed.save(folder / "cluster-probed.json")
    probed.save(folder / "cluster.json")
    for name in (CLUSTER, "h200-single"):
        facts = {key: value for key, value in msgspec.to_builtins(catalogue()[name]).items() if value is not None}
        (folder / f"cluster-facts-{name}.json").write_text(json.dumps(facts, indent=1))
    return tuple(_each(folder, "cluster-*", readers.read_cluster))


def _probed(named: Cluster) -> Cluster:
    """As a probe of two cores writes it."""
    rates = tuple(
        Rate(kind=kind, dtype="fp32", size=size, per_second=1e9 + size)
        for kind in get_args(OpKind)
        for size in (1e4, 1e6)
    )
    device = msgspec.structs.replace(
        named.device,
        name="cpu",
        kind="cpu",
        memory_bytes=4 << 30,
        rates=rates,
        peaks={},
        bytes_per_second=None,
        constants=None,
    )
    times = tuple(
        CollectiveTime(kind=kind, num_ranks=2, num_bytes=size, seconds=1e-4)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
        for size in (1024, 1 << 20)
    )
    return msgspec.structs.replace(
        named,
        name="local",
        origin="probe",
        devices_per_host=2,
        device=device,
        collectives=times,
        host_memory_bytes=8 << 30,
    )


def _run_folder(folder: Path, plan: Plan) -> None:
    """As a run leaves it."""
    cluster = Cluster.named(CLUSTER)
    (folder / "traces").mkdir(parents=True)
    Settings(model=MODEL).save(folder / "settings.toml")
    plan.save(folder / "plan.json")
    estimate(graph(), plan, cluster).save(folder / "estimate.json")
    forecast(graph(), plan, cluster).save(folder / "forecast.json")
    cluster.save(folder / "cluster.json")
    traces = [_trace(plan, rank) for rank in range(plan.world)]
    traces[0].save(folder / "trace.json")
    for trace in traces:
        trace.save(folder / f"traces/rank-{trace.rank:05d}.json")
    lines = [
        {"step": step, "loss": 5.0 / (1 + step), "tokens_per_second": 100.0, "learning_rate": 1e-3}
        for step in range(STEPS)
    ]
    lines[5] |= {"validation_loss": 4.5, "dropped_tokens": 1, "routed_tokens": 8}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _trace(plan: Plan, rank: int) -> Trace:
    parts = TimeParts(forward=0.04, backward=0.05, update=0.01)
    memory = MemoryParts(parameters=4000 + rank, optimizer_state=8000, activations=100)
    timeline = (
        Interval(stream="compute", part="forward", start_seconds=0.0, seconds=0.04),
        Interval(stream="compute", part="backward", start_seconds=0.04, seconds=0.05),
        Interval(
            stream="communication", part="all_reduce", start_seconds=0.08, seconds=0.01, axis="dp", num_bytes=4096
        ),
    )
    return Trace(
        plan=plan.hash, rank=rank, num_ranks=plan.world, step_seconds=0.1, time_seconds=parts, peak_bytes=memory.total,
        memory_bytes=memory, host_bytes=1 << 28, tokens_per_second=1000.0, timeline=timeline, sampled_at=1000.0, num_steps=STEPS,
        part_seconds=(PartSeconds(stream="compute", part="forward", seconds=0.04, count=1),),
        memory_over_time=tuple(MemoryPoint(at_seconds=0.01 * number, memory_bytes=memory) for number in range(5)),
        steps=tuple(
            StepRecord(step=step, loss=5.0, seconds=0.1, tokens=100, sampled=step == 2, time_seconds=parts) for step in range(STEPS)
        ),
        environment=(("torch", "2.13.0"),),
    )  # fmt: skip


def _checkpoint(folder: Path) -> None:
    program, rank = program_and_rank()
    example = resolve(MODEL).example
    assert example is not None
    program.step(example(2))
    plan = program.plan
    save(program, Progress(step=2, cursor=4, plan=plan.hash, graph=plan.graph, num_ranks=1), folder, rank, keep=1)


def _configs(folder: Path) -> list[Example]:
    for name in CONFIGS:
        fields = json.loads((ASSETS / f"{name}.json").read_text())
        (folder / f"config-{name}.json").write_text(json.dumps(fields, indent=1))
    return _each(folder, "config-*", readers.read_config)


def _names(folder: Path) -> list[Example]:
    for number, name in enumerate(NAMES):
        (folder / f"model-{number}.name").write_text(name)
    return _each(folder, "model-*.name", readers.read_name)


def _in_child(work: Callable[[], None]) -> None:
    """Process groups leave threads behind, which the process that forks must not have."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    wait_for(child, 300.0)
