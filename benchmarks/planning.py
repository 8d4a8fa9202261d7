"""How long a search takes, cold and with capture, what it holds, how that grows, and how it does beside published plans.

    python benchmarks/planning.py [--only speed,growth,published,constrained] [--models "Llama 405B,…"] [--write]

speed       `meshwright plan` in a fresh process with an empty cache: wall time, the search's own part, and the most memory it held
growth      CPU seconds of the search against the number of blocks and of devices, the graph known, with the fitted exponents
published   the ten models of sc21-table1 under the same cost model: the estimate of the published plan, of the fastest one, and
            of the one that is chosen

constrained the models of `speed`: a free search beside searches that fix one flag each, none of which may find a faster plan. It
            takes long, and runs only where it is asked for

`--write` puts the tables into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.core.cluster import Cluster, from_facts, read_facts
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.graph import Graph
from meshwright.core.request import PlanRequest
from meshwright.core.result import describe
from meshwright.core.units import format_seconds
from meshwright.cost.estimate import estimate
from meshwright.interop.published import Run, read_runs
from meshwright.planner.graphs import both_castings, graph_of
from meshwright.planner.plan import plain_precision
from meshwright.report.published import plan_of, read
from meshwright.searching.search import search

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
PUBLISHED = ROOT.parent / "shared" / "published"
BEGIN, END = "<!-- planning: begin -->", "<!-- planning: end -->"
COLD = {
    "GPT 39e9, 64 V100": ("gpt:layers=48,hidden=8192,heads=64,seq=1024,vocab=51200", "v100-16g-p3", 8, 1024),
    "GPT 1e12, 3,072 A100": (
        "gpt:layers=128,hidden=25600,heads=160,seq=2048,vocab=51200",
        "a100-80g-selene",
        384,
        3072,
    ),
    "Wide-ResNet, 64 V100": ("resnet:depth=50,width=2,image=224,classes=1024,channels=320", "v100-16g-p3", 8, 1536),
    "MoE of 64 experts, 64 A100": (
        "moe:layers=12,hidden=1024,heads=16,seq=1024,vocab=50304,experts=64",
        "a100-80g-selene",
        8,
        512,
    ),
    "Llama 405B, 16,384 H100": (
        f"hf:{ROOT / 'tests/assets/llama-405b.json'},seq=8192",
        "h100-80g-mosaic",
        2048,
        2048,
    ),
    "DeepSeek-V3, 2,048 H100": (
        f"hf:{ROOT / 'tests/assets/deepseek-v3.json'},seq=4096",
        "h100-80g-mosaic",
        256,
        2048,
    ),
}
DEPTHS, HOSTS, REPEATS = (12, 24, 48, 96), (1, 4, 16, 64), 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="speed,growth,published")
    parser.add_argument(
        "--models", default=",".join(name.split(",")[0] for name in COLD), help="of speed and constrained"
    )
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    for name in list(COLD):
        if name.split(",")[0] not in asked.models.split(","):
            del COLD[name]
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "speed": speed,
        "growth": growth,
        "published": published,
        "constrained": constrained,
    }
    lines: list[str] = []
    for name in asked.only.split(","):
        for line in parts[name]():
            print(line, flush=True)
            lines.append(line)
        lines.append("")
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN)
        PAGE.write_text(head + BEGIN + "\n" + "\n".join(lines) + END + rest.split(END)[1], encoding="utf-8")


def speed() -> Iterator[str]:
    yield "| model | wall time, cold | search | memory held | step | gap | choice |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for name, (model, cluster, hosts, batch) in COLD.items():
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "meshwright", "plan", model, "--cluster", cluster, "--hosts", str(hosts)]
            command += ["--global-batch", str(batch), "--json"]
            started = time.perf_counter()
            done = subprocess.run(command, env={**os.environ, "XDG_CACHE_HOME": cache}, capture_output=True, text=True)
            wall = time.perf_counter() - started
        held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        if done.returncode:
            yield f"| {name} | {wall:.1f} s | | {held:.2f} GiB | | | {done.stderr.strip().splitlines()[-1][:120]} |"
            continue
        said = json.loads(done.stdout.strip().splitlines()[-1])
        mesh = " · ".join(f"{axis} {degree}" for axis, degree in said["plan"]["mesh"].items() if degree > 1)
        gap = "–" if said.get("gap") is None else f"{said['gap']:.0%}"
        yield (
            f"| {name} | {wall:.1f} s | {said['search_seconds']:.1f} s | {held:.2f} GiB | "
            f"{said['estimate']['step_seconds']:.3g} s | {gap} | {mesh}, {said['plan'].get('schedule', '1f1b')} |"
        )


def growth() -> Iterator[str]:
    """Search time grows as blocks^a, and as devices^b: linearly in blocks is a = 1, with the logarithm of devices b near 0."""
    yield "| blocks | devices | search | |"
    yield "|---:|---:|---:|---|"
    deep = {depth: _seconds(depth, 8) for depth in DEPTHS}
    wide = {hosts: _seconds(24, hosts) for hosts in HOSTS}
    longest = max((*deep.values(), *wide.values()))
    for depth, seconds in deep.items():
        yield f"| {depth} | 64 | {seconds:.2f} s | {_bar(seconds, longest)} |"
    for hosts, seconds in wide.items():
        yield f"| 24 | {8 * hosts} | {seconds:.2f} s | {_bar(seconds, longest)} |"
    yield ""
    ratio = wide[HOSTS[-1]] / wide[HOSTS[0]]
    logs = math.log2(8 * HOSTS[-1]) / math.log2(8 * HOSTS[0])
    yield (
        f"Search time grows as blocks^{_exponent(deep):.2f} and as devices^{_exponent(wide):.2f}: from {8 * HOSTS[0]} to "
        f"{8 * HOSTS[-1]} devices {ratio:.1f} times, their logarithm {logs:.1f} times."
    )


def _seconds(depth: int, hosts: int) -> float:
    """Of the processor, not of the clock, which others slow down: the least of a few searches, the graph known."""
    model = f"gpt:layers={depth},hidden=4096,heads=32,seq=2048,vocab=51200"
    graph, other = both_castings(model, "bf16")
    cluster = Cluster.named("a100-80g-selene", hosts=hosts)
    request = PlanRequest(global_batch=8 * cluster.num_devices)
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        search(graph, cluster, request, other_casting=other)
        found.append(time.process_time() - started)
    return min(found)


def _exponent(seconds: dict[int, float]) -> float:
    """The slope of a straight line through the logarithms."""
    points = [(math.log(size), math.log(time)) for size, time in seconds.items()]
    sizes, times = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - sizes) * (y - times) for x, y in points) / sum((x - sizes) ** 2 for x, _ in points)


def _bar(seconds: float, longest: float) -> str:
    return "█" * max(1, round(24 * seconds / longest))


CONSTRAINTS: tuple[dict[str, Any], ...] = (
    *({"tp": tp} for tp in (1, 2, 4, 8)),
    *({"pp": pp} for pp in (1, 2, 4, 8, 16)),
    *({"cp": cp} for cp in (1, 2, 8)),
    *({"zero": zero} for zero in (0, 1, 2, 3)),
    *({"schedule": name} for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv")),
    *({"virtual": virtual} for virtual in (2, 3, 4)),
    *({"recompute": mode} for mode in ("none", "selective", "full")),
    *({"microbatch": size} for size in (1, 2, 4)),
)


def constrained() -> Iterator[str]:
    yield "| model | free | the fastest under one flag | flag |"
    yield "|---|---:|---:|---|"
    for name, (model, cluster_name, hosts, batch) in COLD.items():
        cluster = Cluster.named(cluster_name, hosts=hosts)
        graphs = both_castings(model, plain_precision(cluster))
        free = _best(graphs, cluster, batch, {})
        best, flags = min(
            ((_best(graphs, cluster, batch, flags), flags) for flags in CONSTRAINTS), key=lambda one: one[0]
        )
        told = " ".join(f"--{flag} {value}" for flag, value in flags.items())
        gain = "" if best >= free * (1 - 1e-9) else f" **({1 - best / free:.1%} faster)**"
        yield f"| {name} | {format_seconds(free)} | {format_seconds(best)}{gain} | `{told}` |"


def _best(graphs: tuple[Graph, Graph | None], cluster: Cluster, batch: int, flags: dict[str, Any]) -> float:
    """Seconds of the fastest plan; infinite where none fits."""
    request = PlanRequest(global_batch=batch, **flags)
    try:
        found = search(graphs[0], cluster, request, other_casting=graphs[1], prefer_fastest=True)
    except (InfeasibleError, PlanError):
        return math.inf
    return found.estimate.step_seconds


def published() -> Iterator[str]:
    yield "| parameters | GPUs | published plan | its step, estimated | fastest | chosen | at least as fast, and fits |"
    yield "|---|---:|---|---:|---:|---:|---|"
    facts = read_facts((PUBLISHED / "clusters.json").read_text(encoding="utf-8"), "clusters.json")
    runs = [
        run for run in read_runs(PUBLISHED / "runs.csv") if isinstance(run, Run) and run.source_table == "sc21-table1"
    ]
    for run in runs:
        reading = read(run, facts[run.cluster])
        graph = graph_of(reading.model, reading.precision)
        other = graph_of(reading.model, reading.precision, "parameters")
        hosts = -(-run.num_gpus // facts[run.cluster].devices_per_host)
        cluster = _with_hosts(from_facts(run.cluster, facts[run.cluster]), hosts)
        plan = plan_of(reading, graph, cluster.hash)
        theirs = estimate(graph if plan.casting == graph.casting else other, plan, cluster, reading.recipe)
        request = PlanRequest(global_batch=plan.global_batch, compile=False)
        found = [
            search(graph, cluster, request, recipe=reading.recipe, other_casting=other, prefer_fastest=fastest)
            for fastest in (True, False)
        ]
        steps = " | ".join(f"{one.estimate.step_seconds:.1f} s" for one in found)
        good = found[0].estimate.fits and found[0].estimate.step_seconds <= theirs.step_seconds
        yield (
            f"| {graph.num_parameters / 1e9:.1f}e9 | {run.num_gpus} | {describe(plan)} | {theirs.step_seconds:.1f} s | {steps} | "
            f"{'yes' if good else '**no**'} |"
        )


def _with_hosts(cluster: Cluster, hosts: int) -> Cluster:
    import msgspec

    return msgspec.structs.replace(cluster, num_hosts=hosts)


if __name__ == "__main__":
    main()
