"""A run on one rank, from what it was told to what it came to: build, load weights or a checkpoint, train."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from rich.console import Console
from torch import nn

from meshwright.core.graph import identity
from meshwright.models.parameters import list_parameters
from meshwright.models.seeded import seed_like_torch
from meshwright.models.source import ModelSource, resolve
from meshwright.runtime.apply import apply
from meshwright.runtime.deferred import building
from meshwright.runtime.program import Program
from meshwright.runtime.ranks import Rank
from meshwright.runtime.undrawn import undrawn
from meshwright.runtime.watch import Recorder
from meshwright.training.data import open_streams
from meshwright.training.job import Job, Outcome
from meshwright.training.loop import Loop, Start
from meshwright.training.optimizers import make_optimizer
from meshwright.training.positions import find_positions, within_positions
from meshwright.training.pretrained import fill, match
from meshwright.training.resuming import resume
from meshwright.training.stream import Slice
from meshwright.training.weights_folder import WeightsFolder


def run(job: Job, rank: Rank, recorder: Recorder | None, console: Console) -> Outcome:
    """Train, and leave metrics, trace and a checkpoint in the run folder. Every rank calls it."""
    torch.manual_seed(job.settings.seed)
    source = resolve(job.settings.model)
    weights = None if job.resume else job.settings.weights
    with building(job.plan), undrawn() if weights else nullcontext():
        module = source.build()
    graph, table = identity(list_parameters(module)), find_positions(module)
    matched = match(WeightsFolder(weights), module) if weights else None
    program = build_program(job, module, source, rank, recorder)
    if matched is not None:
        imported = fill(program, matched)
        if rank.is_first:
            console.print(imported.describe(matched), highlight=False)
    replica = program.mesh.get_local_rank("dp")
    torch.manual_seed(job.settings.seed + replica)  # replicas draw their own dropout
    seed_like_torch()
    part = Slice(replica, job.plan.mesh.dp)
    train, validation = open_streams(job.settings.data, source, job.plan.global_batch, part, job.settings.seed)
    train = within_positions(train, table)
    first_step = resume(job, rank, program, graph, train, console) if job.resume else 0
    outcome = Loop(job, rank, program, Start(graph, train, validation, first_step), console).run()
    program.close()
    return outcome


def build_program(job: Job, module: nn.Module, source: ModelSource, rank: Rank, recorder: Recorder | None) -> Program:
    clip_norm = job.settings.optimizer.clip_norm
    return apply(
        module,
        job.plan,
        optimizer=make_optimizer(module, job.settings),
        objective=source.objective,
        max_norm=None if clip_norm == "none" else clip_norm,
        recorder=recorder,
        device=rank.device,
        find_nan=job.settings.find_nan,
        host_link=job.settings.host_link,
        sample_seed=job.settings.seed if job.settings.random == "sample" else None,
    )
