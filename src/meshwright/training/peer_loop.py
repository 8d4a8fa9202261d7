"""The loop around a peer: our batches, seed and learning rate, its module. Leaves metrics and a trace like a run of ours."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from meshwright.core.estimate import TimeParts
from meshwright.core.plan import Plan
from meshwright.core.run.trace import StepRecord, Trace, steps_that_count
from meshwright.models.objective import Batch, call, map_batch
from meshwright.models.source import resolve
from meshwright.runtime.environment import describe_environment, peak_resident_bytes
from meshwright.runtime.ranks import Rank
from meshwright.training.data import open_streams
from meshwright.training.folder import RunFolder
from meshwright.training.metrics import Metrics
from meshwright.training.optimizers import learning_rate, set_learning_rate
from meshwright.training.peers import prepare
from meshwright.training.settings import Settings
from meshwright.training.stream import Slice


def run_peer(name: str, settings: Settings, plan: Plan, folder: RunFolder, rank: Rank) -> None:
    """Train as a peer does. plan: ours that does the same; its hash ties the trace to the folder."""
    torch.manual_seed(settings.seed)
    source = resolve(settings.model)
    peer = prepare(name, source.build().to(rank.device), settings)
    part = Slice(dist.get_rank(), dist.get_world_size())
    stream, _ = open_streams(settings.data, source, plan.global_batch, part, settings.seed)
    metrics = Metrics(folder, 0) if rank.is_first else None
    records = []
    for step in range(settings.steps):
        rate = learning_rate(step, settings.steps, settings.learning_rate)
        set_learning_rate(peer.optimizer, rate)
        batch = _moved(stream.next(), rank.device)
        started = time.perf_counter()
        loss = source.objective.loss(call(peer.module, batch), batch)
        peer.update(loss)
        mean, count = _summed(loss, source.objective.count(batch), rank.device)
        seconds = time.perf_counter() - started
        records.append(
            StepRecord(step=step, loss=mean, seconds=seconds, time_seconds=TimeParts(other=seconds), tokens=count)
        )
        if metrics is not None:
            metrics.write(
                step, {"loss": mean, "learning_rate": rate, "seconds": seconds, "tokens_per_second": count / seconds}
            )
    if metrics is not None:
        metrics.close()
        _trace(records, plan, rank).save(folder.trace)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return map_batch(lambda tensor: tensor.to(device), batch)


def _summed(loss: torch.Tensor, count: int, device: torch.device) -> tuple[float, int]:
    """The loss over the global batch, and what it is a mean of."""
    sums = torch.tensor([float(loss.detach()) * count, count], dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    total, number = sums.tolist()
    return total / max(number, 1.0), int(number)


def _trace(records: list[StepRecord], plan: Plan, rank: Rank) -> Trace:
    counted = steps_that_count(tuple(records))
    seconds = statistics.median(record.seconds for record in counted)
    return Trace(
        plan=plan.hash,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        step_seconds=seconds,
        time_seconds=TimeParts(other=seconds),
        host_bytes=peak_resident_bytes(),
        tokens_per_second=statistics.fmean(record.tokens for record in counted) / seconds,
        num_steps=len(records),
        steps=tuple(records),
        environment=describe_environment(rank.device),
    )
