"""What reads each format for real: the functions behind the verbs, as far as a file's content reaches into them."""

from __future__ import annotations

import warnings
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from rich.console import Console

from meshwright.capturing.capture import capture_source
from meshwright.cli.report import report
from meshwright.core.cluster import Cluster, load_cluster
from meshwright.core.files.disk import read_facts
from meshwright.core.graph import Graph
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.cost.estimate import estimate
from meshwright.cost.forecast import forecast
from meshwright.interop.accelerate import load_accelerate
from meshwright.interop.deepspeed import load_deepspeed
from meshwright.interop.foreign import foreign_plan
from meshwright.jobs.layout import check_settings, lay_out_on
from meshwright.jobs.settings import put_right, read_settings
from meshwright.models.source import resolve
from meshwright.planner.clusters import find_cluster
from meshwright.planner.decision import world_of_run
from meshwright.planner.estimate import check_made_for
from meshwright.planner.graphs import graph_of
from meshwright.planner.plan import PlanQuestion
from meshwright.planner.subject import NamedModel
from meshwright.rules.limits import check_runs
from meshwright.rules.plain_plan import plain_plan
from meshwright.rules.stages import check_blocks
from meshwright.runtime.apply import apply
from meshwright.runtime.launch import check_num_ranks
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank, join
from meshwright.training.checkpoint import check_same_model, restore
from meshwright.training.folder import RunFolder
from meshwright.training.lock import RunLock
from meshwright.training.manifest import FILE as MANIFEST
from meshwright.training.manifest import Manifest
from meshwright.training.metrics import Metrics, dropped_tokens, last_loss, values_at

MODEL = "gpt:layers=4,hidden=16,heads=2,seq=8,vocab=32"
CLUSTER = "a100-80g-selene"
NOT_GIVEN = dict.fromkeys(
    ("nproc", "steps", "out", "seed", "timeout", "find_nan", "check", "restarts", "memory"), None
) | {"device": "auto", "backend": "auto", "fewer_ranks": False}
SEARCHED_ONE_IN = 8
"""Clusters that are read also get a search on them, but not all: a search takes longer than all else."""


@cache
def graph() -> Graph:
    return graph_of(MODEL, "fp32")


def quiet() -> Console:
    return Console(file=open("/dev/null", "w"), width=100)


def read_plan(path: Path) -> None:
    """`meshwright estimate --plan`, and what `train` and `parity` ask of a plan."""
    plan = Plan.load(path)
    check_made_for(plan, graph(), str(path))
    check_runs(plan)
    check_blocks(graph(), plan)
    cluster = Cluster.named(CLUSTER, ceil(plan.world / 8))
    estimate(graph(), plan, cluster)
    forecast(graph(), plan, cluster)


def read_run_settings(path: Path) -> None:
    """`meshwright train`, up to where it would start its ranks. This machine is not measured: a cluster stands in for it."""
    settings = read_settings(str(path), PlanRequest(), None, dict(NOT_GIVEN))
    settings = msgspec.structs.replace(settings, out="out")
    check_settings(settings, resume=False)
    world = world_of_run(settings)
    if settings.cluster == "local":
        check_num_ranks(world or 1)
        cluster = Cluster.load("cluster.json")
    else:
        cluster = find_cluster(settings.cluster, settings.hosts, world, settings.device, settings.backend)
    lay_out_on(cluster, settings, world, False, quiet(), RunLock("out"))


def read_foreign(path: Path) -> None:
    """`meshwright plan --from-deepspeed`, `--from-accelerate`, without the search for something better."""
    foreign = load_deepspeed(str(path)) if path.name.startswith("deepspeed") else load_accelerate(str(path))
    found = Cluster.named(CLUSTER, foreign.num_hosts or 1)
    open_batch = foreign.request.global_batch is None and foreign.request.microbatch is None
    flags = PlanRequest(global_batch=16) if open_batch else PlanRequest()
    plan = foreign_plan(foreign, flags, graph(), found.num_devices, found.hash)
    estimate(graph(), plan, found, foreign.recipe)


def read_cluster(path: Path) -> None:
    """`meshwright estimate --cluster`; now and then `meshwright plan --cluster`."""
    cluster = load_cluster(str(path))
    plan = plain_plan(PlanRequest(), graph(), cluster.num_devices, cluster.hash)
    estimate(graph(), plan, cluster)
    forecast(graph(), plan, cluster)
    if crc32(path.read_bytes()) % SEARCHED_ONE_IN == 0:
        PlanQuestion(NamedModel(MODEL), graph(), None, cluster, PlanRequest(global_batch=8, precision="fp32")).answer()


def read_checkpoint(path: Path) -> None:
    """What `train --resume` restores. A file other than the manifest gets the checksum that it now has."""
    checkpoint = path.parent
    if path.name != MANIFEST and path.is_file() and path.stat().st_size < 1 << 30:
        manifest = Manifest.load(checkpoint / MANIFEST)
        manifest.files[path.name] = read_facts(path)
        manifest.save(checkpoint / MANIFEST)
    program, rank = program_and_rank()
    check_same_model(checkpoint.parent, program.plan.graph, dict)
    restore(program, program.plan.graph, checkpoint.parent, rank)


@cache
def program_and_rank() -> tuple[Program, Rank]:
    """A program of one rank, once in every process."""
    import torch

    rank = join("cpu", "gloo")
    source = resolve(MODEL)
    plan = plain_plan(PlanRequest(global_batch=2), graph(), 1, "")
    optimizer: Any = torch.optim.AdamW
    return apply(source.build(), plan, optimizer=optimizer, objective=source.objective, device=rank.device), rank


def read_run_folder(path: Path) -> None:
    """`meshwright report`: the tables, the page and the trace for Perfetto."""
    folder = next(one for one in path.parents if (one / "settings.toml").exists())
    report([str(folder)], output="page.html", chrome="chrome.json")


def read_metrics_of_run(path: Path) -> None:
    """A run that is shown, resumed and summed up."""
    folder = RunFolder(path.parent)
    try:
        read_run_folder(path)
    finally:
        put_right(str(folder.path), None, quiet())
        values_at(folder.metrics, 5)
        last_loss(folder)
        dropped_tokens(folder.metrics)
        Metrics(folder, 3).close()


def read_config(path: Path) -> None:
    """`meshwright plan hf:CONFIG.json` without the search."""
    _plan_model(f"hf:{path}")


def read_name(path: Path) -> None:
    """`meshwright plan NAME` without the search."""
    name = path.read_bytes().decode("utf-8", "surrogateescape")
    if not name.endswith(".py") and ".py:" not in name:  # a file of Python is no data
        _plan_model(name)


def _plan_model(name: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        found = capture_source(resolve(name))
    cluster = Cluster.named(CLUSTER)
    plan = plain_plan(PlanRequest(), found, cluster.num_devices, cluster.hash)
    estimate(found, plan, cluster)
