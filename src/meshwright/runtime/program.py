"""A Program: a module spread over ranks by a plan, and the step that trains it.

The step loops over the plan's schedule. The loss of the global batch is the mean over all its tokens, whatever the number
of ranks and microbatches:

    loss = Σ_ranks Σ_microbatches mean_i · count_i / Σ count      each backward runs on  mean_i · count_i · dp / Σ count

(the factor dp, because data parallelism averages over ranks). Σ count is summed while the first forward runs.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, Schedule
from meshwright.core.trace import Trace, steps_that_count
from meshwright.models.objective import Batch, Objective, call, num_samples, slice_batch
from meshwright.runtime.clock import Mark, mark
from meshwright.runtime.data_parallel import (
    give_up_gathered,
    inner,
    prepare_microbatch,
    replicate_again,
)
from meshwright.runtime.dropped import Dropped
from meshwright.runtime.environment import describe_environment, peak_resident_bytes
from meshwright.runtime.gate import Gate
from meshwright.runtime.mesh import local_device
from meshwright.runtime.nan import NanFinder, not_finite
from meshwright.runtime.offload.optimizer import HostOptimizer
from meshwright.runtime.out_of_memory import memory_explained
from meshwright.runtime.pipeline.pipeline import Pipeline
from meshwright.runtime.precision import compute_context, to_device
from meshwright.runtime.reach import reach
from meshwright.runtime.scaling import LossScale, Scales
from meshwright.runtime.split.model import SplitModel
from meshwright.runtime.step import StepOutput, divided, median_parts
from meshwright.runtime.update import UnusedError, Update
from meshwright.runtime.watch import Watch

KEPT_STEPS = 1000
"""Steps a trace tells of one by one, the last ones: a run of weeks must not fill the memory with those before."""


class Program:
    """Made by `apply`. It owns the spread module and its optimizer."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        schedule: Schedule,
        mesh: DeviceMesh,
        objective: Objective,
        max_norm: float | None = None,
        watch: Watch | None = None,
        split: SplitModel | None = None,
        finder: NanFinder | None = None,
        pipeline: Pipeline | None = None,
        host: HostOptimizer | None = None,
    ) -> None:
        self.spread_module = module
        self.optimizer = optimizer
        self.plan = plan
        self.schedule = schedule
        self.mesh = mesh
        self.objective = objective if split is None else split.whole_loss(objective)
        self.device = local_device(mesh)
        self.watch = watch or Watch(None)
        self.first_step = 0
        """What messages count steps from: a resumed run goes on counting."""
        self.gate: Gate | None = None
        """Asked before every update, where there is one."""
        self._finder = finder
        self._outputs: deque[StepOutput] = deque(maxlen=KEPT_STEPS)
        self._num_forgotten = 0
        self.split = split
        self._compute = compute_context(plan, self.device, split.splitter if split else None)
        self.pipeline = pipeline
        self._dp, self._pp = mesh.get_group("dp"), mesh.get_group("pp")
        self.host = host
        self._update = Update(module, optimizer, plan, mesh, max_norm, split, pipeline, host)
        self._coordinate = mesh.get_local_rank("pp")
        self._dropped = Dropped(module)
        states = pipeline.states if pipeline is not None else {}
        self._dropped_of = {stage: Dropped(state.held) for stage, state in states.items()}

    @property
    def module(self) -> nn.Module:
        """The user's module; its parameters are shards under ZeRO."""
        return inner(self.spread_module)

    @property
    def loss_scale(self) -> LossScale | None:
        return self._update.loss_scale

    @property
    def num_steps(self) -> int:
        return self._num_forgotten + len(self._outputs)

    def step(self, batch: Batch, signal: float = 0.0) -> StepOutput:
        """Train on one global batch: this rank's share of it, or all of it (then the share is taken here)."""
        share = self.share_of(batch)
        if self._finder is not None:
            self._finder.begin(self.first_step + self.num_steps, share)
        with memory_explained(self, share):
            output = self._run_step(share, signal)
        if self._finder is not None and not math.isfinite(output.loss):
            raise not_finite(output.loss, self.first_step + self.num_steps, self._finder.earliest())
        self._num_forgotten += len(self._outputs) == KEPT_STEPS
        self._outputs.append(output)
        return output

    def _run_step(self, share: Batch, signal: float) -> StepOutput:
        if self.num_steps == 0:
            return self._first_step(share, signal)
        if self.watch.wants(self.num_steps):
            return self.watch.record(self, share, lambda: self._step(share, signal), list(self._outputs))
        return self._step(share, signal)

    def share_of(self, batch: Batch) -> Batch:
        """This rank's samples of a global batch. A batch that already is the share is returned as it is."""
        own = self.plan.microbatch * self.plan.num_microbatches
        found = num_samples(batch)
        if found == own:
            return batch
        if found != self.plan.global_batch:
            raise PlanError(
                f"the batch has {found} samples: give this rank's {own}, or the global batch of {self.plan.global_batch}"
            )
        start = self.mesh.get_local_rank("dp") * own
        return slice_batch(batch, start, start + own)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over batches, each a share or a global batch, without training; in microbatches, as training runs."""
        modes = {part: part.training for part in self.spread_module.modules()}
        self.spread_module.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for batch in batches:
                for index, microbatch in enumerate(self._microbatches(self.share_of(batch))):
                    sums += self._loss_and_count(microbatch, index)
        if self.pipeline is not None:
            self.pipeline.links.finish()
            self.pipeline.give_up_gathered()
            dist.all_reduce(sums, group=self._pp)
        dist.all_reduce(sums, group=self._dp)
        give_up_gathered(self.module)
        for part, mode in modes.items():
            part.training = mode  # parts the user keeps in eval mode stay there
        total, count = sums.tolist()
        return float(total / max(count, 1.0))

    def _loss_and_count(self, microbatch: Batch, index: int) -> Tensor:
        """Zero on a stage that has no loss."""
        count = self.objective.count(microbatch)
        moved = self._moved(microbatch)
        if self.pipeline is not None:
            found = self.pipeline.evaluate(moved, index, self._compute, self.objective)
            if found is None:
                return torch.zeros(2, dtype=torch.float64, device=self.device)
            loss = found
        else:
            loss = self._loss(moved)
        return torch.stack([loss.double() * count, torch.full_like(loss, count, dtype=torch.float64)])

    def sync_buffers(self) -> None:
        """Buffers follow each rank's own samples (batch norm): before they are used or saved, the first rank's count."""
        if self.split is not None:
            self.split.sync_buffers(self.module)
        for buffer in self.module.buffers():
            dist.broadcast(buffer, group=self._dp, group_src=0)

    def forget_steps(self) -> None:
        """Those so far were a trial: no trace counts them."""
        self._outputs.clear()
        self._num_forgotten = 0

    def take_over_loaded(self) -> None:
        """Parameters and optimizer state were loaded into the module and the optimizer."""

    def trace(self) -> Trace:
        """What this rank saw so far."""
        sample = self.watch.sample
        records = tuple(output.record(index) for index, output in enumerate(self._outputs, self._num_forgotten))
        counted = steps_that_count(records)
        seconds = statistics.median(record.seconds for record in counted) if counted else 0.0
        tokens = statistics.fmean(record.tokens for record in counted) if counted else 0.0
        return Trace(
            plan=self.plan.hash,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            step_seconds=seconds,
            time_seconds=divided(median_parts(counted), sample.time_seconds) if sample else median_parts(counted),
            peak_bytes=sample.memory_bytes.total if sample else None,
            memory_bytes=sample.memory_bytes if sample else None,
            host_bytes=peak_resident_bytes(),
            tokens_per_second=tokens / seconds if seconds else 0.0,
            collectives=sample.collectives if sample else (),
            timeline=sample.timeline if sample else (),
            part_seconds=sample.part_seconds if sample else (),
            sampled_at=sample.started_at if sample else None,
            memory_over_time=sample.memory_over_time if sample else (),
            num_steps=self.num_steps,
            steps=records,
            environment=describe_environment(self.device),
        )

    def _first_step(self, batch: Batch, signal: float) -> StepOutput:
        """A parameter that no rank uses gets no gradient in one process; replicas would give it zeros."""
        try:
            return self._step(batch, signal)
        except UnusedError as error:
            unused = error.names
        self.spread_module = replicate_again(self.spread_module, unused, self.mesh)
        gc.collect()  # the old replicas must be gone: as long as they live, their hooks see every backward
        return self._step(batch, signal)

    def _step(self, batch: Batch, signal: float) -> StepOutput:
        marks: list[tuple[str, Mark]] = [("start", mark(self.device))]
        microbatches = self._microbatches(batch)
        counts = [self.objective.count(microbatch) for microbatch in microbatches]
        total_count, counting = self._sum_counts(sum(counts))
        sums = torch.tensor([0.0, signal, 0.0, 0.0], dtype=torch.float64, device=self.device)
        losses: dict[int, Tensor] = {}
        norm, opens = None, True
        factor = self.plan.mesh.dp * (self.loss_scale.scale if self.loss_scale is not None else 1.0)
        scales = Scales(counts, factor, total_count, counting)
        actions = self.schedule.actions[self._coordinate]
        for place, action in enumerate(actions):
            index = action.microbatch
            if action.kind == "update":
                if place == len(actions) - 1:  # all stages of a coordinate in one
                    opens = self._gate_opens(sums, total_count)
                    norm = self._apply_gradients() if opens else None
            elif self.pipeline is not None:
                loss = self._do(self.pipeline, action, microbatches[index], scales)
                sums[0] += 0.0 if loss is None else loss.detach() * counts[index]
                if action.kind == "forward":
                    self._dropped_of[action.stage].add_to(sums[2:])
            elif action.kind == "forward":
                losses[index] = self._forward(microbatches[index], is_last=index == len(microbatches) - 1)
                sums[0] += losses[index].detach() * counts[index]
                self._dropped.add_to(sums[2:])
            elif action.kind == "backward":
                self._backward(losses.pop(index), scales.of(index))
            marks.append((action.kind, mark(self.device)))
        if self.plan.mesh.pp > 1:
            dist.all_reduce(sums, group=self._pp)
        work = dist.all_reduce(sums, group=self._dp, async_op=True) if self.plan.mesh.dp > 1 else None
        return StepOutput(sums, total_count, work, marks, norm, left_out=not opens)

    def _do(self, pipeline: Pipeline, action: Action, microbatch: Batch, scales: Scales) -> Tensor | None:
        """One action of a stage; the loss, where it has one."""
        if action.kind == "forward":
            moved = self._moved(microbatch)
            with self.watch.region("forward"):
                return pipeline.forward(action, moved, self._compute, self.objective)
        if action.kind in ("backward", "backward_inputs"):
            with self.watch.region("backward"):
                pipeline.backward(action, scales.of(action.microbatch))
        elif action.kind == "backward_weights":
            with self.watch.region("backward"), self.watch.region("weights"):
                pipeline.backward_weights(action)
        else:
            with self.watch.region("waiting" if action.kind.startswith("receive") else "transfer"):
                pipeline.transfer(action, to_device(microbatch, self.plan, self.device))
        return None

    def _microbatches(self, batch: Batch) -> list[Batch]:
        size = self.plan.microbatch
        return [slice_batch(batch, size * index, size * (index + 1)) for index in range(self.plan.num_microbatches)]

    def _sum_counts(self, count: int) -> tuple[Tensor, Any]:
        total = torch.tensor(float(count), dtype=torch.float64, device=self.device)
        work = dist.all_reduce(total, group=self._dp, async_op=True) if self.plan.mesh.dp > 1 else None
        return total, work

    def _forward(self, microbatch: Batch, is_last: bool) -> Tensor:
        prepare_microbatch(self.spread_module, self.plan, is_last)
        if self.host is not None:
            self.host.begin(is_last)
        moved = self._moved(microbatch)
        with self.watch.region("forward"):
            return self._loss(moved)

    def _moved(self, microbatch: Batch) -> Batch:
        """Where the module is; a split model is told what its tokens are."""
        moved = to_device(microbatch, self.plan, self.device)
        if self.split is not None:
            self.split.splitter.read(moved)
        return moved

    def _loss(self, moved: Batch) -> Tensor:
        with self._compute():
            return self.objective.loss(call(self.spread_module, moved), moved)

    def _backward(self, loss: Tensor, scale: Tensor) -> None:
        with self.watch.region("backward"):
            reach(loss * scale.to(loss.dtype), self.spread_module).backward()

    def _gate_opens(self, sums: Tensor, count: Tensor) -> bool:
        """Whether there is to be an update; where not, the gradients are forgotten."""
        if self.gate is None or self.gate.opens(sums[:1], count, (self._pp, self._dp), self.module.parameters()):
            return True
        self._update.leave_out()
        return False

    def _apply_gradients(self) -> Tensor | None:
        """The norm of the gradients, where they were clipped."""
        self._update.find_unused()
        if self._finder is not None:
            self._finder.before_update()
        with self.watch.region("update"):
            return self._update.run()
