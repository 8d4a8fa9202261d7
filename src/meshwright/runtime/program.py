"""A Program: a module spread over ranks by a plan, and the step that trains it.

The step loops over the plan's schedule. The loss of the global batch is the mean over all its tokens, whatever the number
of ranks and microbatches (`runtime/tally.py`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.core.errors import RunError
from meshwright.core.pipeline.schedule import Action
from meshwright.core.plan import Plan
from meshwright.core.run.trace import Trace
from meshwright.models.objective import Batch, Objective, call
from meshwright.models.one_process import seen_under
from meshwright.rules.schedules import make_schedule
from meshwright.runtime.answers import Answers
from meshwright.runtime.clock import Mark, mark
from meshwright.runtime.communicators import take_down
from meshwright.runtime.data_parallel import (
    give_up_gathered,
    inner,
    prepare_microbatch,
)
from meshwright.runtime.draws.program import SampleDraws
from meshwright.runtime.dropped import Dropped
from meshwright.runtime.gate import Gate
from meshwright.runtime.history import History
from meshwright.runtime.lowered import Values
from meshwright.runtime.mesh import local_device
from meshwright.runtime.nan import NanFinder, not_finite
from meshwright.runtime.offload.optimizer import HostOptimizer
from meshwright.runtime.offload.saved import masters_of
from meshwright.runtime.out_of_memory import memory_explained
from meshwright.runtime.pipeline.pipeline import Pipeline
from meshwright.runtime.precision import compute_context, to_device
from meshwright.runtime.reach import reach
from meshwright.runtime.same_samples import SameSamples
from meshwright.runtime.samples import microbatches_of, share_of
from meshwright.runtime.scaling import LossScale
from meshwright.runtime.split.model import SplitModel
from meshwright.runtime.step import StepOutput
from meshwright.runtime.synced_buffers import SyncedBuffers
from meshwright.runtime.tally import Peers, Tally
from meshwright.runtime.update import Update
from meshwright.runtime.watch import Watch


class Spread(NamedTuple):
    """A module that is spread over the ranks, with its optimizer."""

    module: nn.Module
    optimizer: Optimizer
    mesh: DeviceMesh
    split: SplitModel | None = None
    pipeline: Pipeline | None = None
    values: Values | None = None
    """The first master weights of parameters that are stored in 16 bits."""


class Program:
    """Made by `apply`. It owns the spread module and its optimizer, until it is closed; `with` closes it."""

    def __init__(
        self,
        spread: Spread,
        plan: Plan,
        objective: Objective,
        max_norm: float | None = None,
        watch: Watch | None = None,
        finder: NanFinder | None = None,
        host: HostOptimizer | None = None,
        draws: SampleDraws | None = None,
    ) -> None:
        module, optimizer, mesh, split, pipeline, _ = spread
        self.spread_module = module
        self.optimizer = optimizer
        self.plan = plan
        self.schedule = make_schedule(plan.schedule, plan.mesh.pp, plan.num_microbatches, plan.virtual)
        self.mesh = mesh
        self.objective = objective if split is None else split.whole_loss(objective)
        self.device = local_device(mesh)
        self.watch = watch or Watch(None)
        self.first_step = 0
        """What messages count steps from: a resumed run goes on counting."""
        self.gate: Gate | None = None
        """Asked before every update, where there is one."""
        self.before_first_step: Callable[[Batch], object] | None = None
        """Called with the first batch, on every rank; what it raises ends the step before anything is trained."""
        self.groups: list[dist.ProcessGroup] = []
        """Communicators that are taken down with it."""
        self._finder = finder
        self._history = History()
        self._answers = Answers(objective.is_given)
        self.split = split
        self._compute = compute_context(plan, self.device, split.splitter if split else None)
        self.pipeline = pipeline
        self._dp, self._pp = mesh.get_group("dp"), mesh.get_group("pp")
        self._others = Peers(self._dp if plan.mesh.dp > 1 else None, self._pp if plan.mesh.pp > 1 else None)
        self.host = host
        self._update = Update(module, optimizer, plan, mesh, max_norm, split, pipeline, host)
        self._samples = SameSamples(plan, mesh.get_local_rank("dp"))
        self._coordinate = mesh.get_local_rank("pp")
        self._draws = draws
        if draws is not None:
            draws.begin(self.module, mesh.get_local_rank("dp"))
        self._dropped = Dropped(module)
        self._buffers = SyncedBuffers(self.module, self._dp)
        states = pipeline.states if pipeline is not None else {}
        self._dropped_of = {stage: Dropped(state.held) for stage, state in states.items()}

    def close(self) -> None:
        """Give back threads, host memory and communicators. Every rank calls it; the program runs no further step, and what its
        module has of it must not be used any more: save before, or read `state_dict()`."""
        if self._is_closed:
            return
        self._give_back()
        plan, groups = self.plan, self.groups
        self.__dict__.clear()
        self.plan, self._is_closed = plan, True
        gc.collect()  # hooks and their modules hold each other
        take_down(groups)

    def _give_back(self) -> None:
        if self.host is not None:
            self.host.close()

    _is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # which would take every name then

        def __getattr__(self, name: str) -> object:
            if self._is_closed:
                raise RunError(f"the program was closed and has no {name!r} any more: make another one with apply")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def module(self) -> nn.Module:
        """The user's module; its parameters are shards under ZeRO."""
        return inner(self.spread_module)

    @property
    def loss_scale(self) -> LossScale | None:
        """What losses are multiplied by in fp16; None in other precisions."""
        return self._update.loss_scale

    @property
    def num_steps(self) -> int:
        """Steps made since the program was."""
        return self._history.num_steps

    def step(self, batch: Batch, signal: float = 0.0) -> StepOutput:
        """Train on one global batch: this rank's share of it, or all of it (then the share is taken here)."""
        self._begin(batch)
        share = self.share_of(batch)
        self._samples.check(share)
        if self.num_steps == 0:
            self._answers.check(self.evaluate, share)
        if self._finder is not None:
            self._finder.begin(self.first_step + self.num_steps, share)
        with memory_explained(self, share), seen_under(self.plan):
            output = self._run_step(share, signal)
        if self._finder is not None and not math.isfinite(output.loss):
            raise not_finite(output.loss, self.first_step + self.num_steps, self._finder.earliest())
        self._history.add(output)
        return output

    def _begin(self, batch: Batch) -> None:
        begin, self.before_first_step = self.before_first_step, None
        if begin is not None:
            begin(batch)

    def _run_step(self, share: Batch, signal: float) -> StepOutput:
        if self.watch.wants(self.num_steps):
            return self.watch.record(self, share, lambda: self._step(share, signal), self._history.outputs)
        return self._step(share, signal)

    def share_of(self, batch: Batch) -> Batch:
        """This rank's samples of a global batch. A batch that already is the share is returned as it is."""
        share = share_of(batch, self.plan, self.mesh.get_local_rank("dp"))
        return self._answers.named(self.module, share)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over batches, each a share or a global batch, without training; in microbatches, as training runs."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad(), _in_eval_mode(self.spread_module), seen_under(self.plan):
            for batch in batches:
                for index, microbatch in enumerate(microbatches_of(self.share_of(batch), self.plan)):
                    sums += self._loss_and_count(microbatch, index)
        if self.pipeline is not None:
            self.pipeline.links.finish()
            self.pipeline.give_up_gathered()
            dist.all_reduce(sums, group=self._pp)
        dist.all_reduce(sums, group=self._dp)
        give_up_gathered(self.module)
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

    def replicated(self) -> dict[str, Tensor]:
        """By name: parameters as they are stored, where other ranks may hold the same; once all updates so far are done."""
        held: dict[str, Tensor] = dict(self.module.named_parameters())
        if self.host is None:
            return held
        self.host.updater.settle()
        masters = masters_of(self.host)
        return {name: masters.get(id(parameter), parameter) for name, parameter in held.items()}

    def forget_steps(self) -> None:
        """Those so far were a trial: no trace counts them."""
        self._history.clear()

    def take_over_loaded(self) -> None:
        """Parameters and optimizer state were loaded into the module and the optimizer."""

    def trace(self) -> Trace:
        """What this rank saw so far."""
        return self._history.trace(self.plan, self.device, self.watch.sample)

    def _step(self, batch: Batch, signal: float) -> StepOutput:
        marks: list[tuple[str, Mark]] = [("start", mark(self.device))]
        microbatches = microbatches_of(batch, self.plan)
        tally = self._tally(microbatches, signal)
        losses: dict[int, Tensor] = {}
        norm, opens = None, True
        actions = self.schedule.actions[self._coordinate]
        for place, action in enumerate(actions):
            if self.pipeline is not None:
                self.pipeline.look_ahead(place, lambda index: to_device(microbatches[index], self.plan, self.device))
            if action.kind != "update":
                self._do(action, microbatches[action.microbatch], tally, losses)
            elif place == len(actions) - 1:  # all stages of a coordinate in one
                opens = self._gate_opens(tally)
                norm = self._apply_gradients() if opens else None
            marks.append((action.kind, mark(self.device)))
        return tally.output(marks, norm, left_out=not opens)

    def _tally(self, microbatches: list[Batch], signal: float) -> Tally:
        counts = [self.objective.count(microbatch) for microbatch in microbatches]
        factor = self.plan.mesh.dp * (self.loss_scale.scale if self.loss_scale is not None else 1.0)
        return Tally(counts, factor, signal, self._others, self.device)

    def _do(self, action: Action, microbatch: Batch, tally: Tally, losses: dict[int, Tensor]) -> None:
        """losses: of microbatches whose backward is to come, where there are no stages to keep them."""
        index = action.microbatch
        if self.pipeline is not None:
            self._do_stage(self.pipeline, action, microbatch, tally)
        elif action.kind == "forward":
            losses[index] = self._forward(microbatch, index)
            tally.add_loss(index, losses[index])
            self._dropped.add_to(tally.dropped)
        elif action.kind == "backward":
            self._backward(losses.pop(index), tally.scale(index))

    def _do_stage(self, pipeline: Pipeline, action: Action, microbatch: Batch, tally: Tally) -> None:
        if action.kind == "forward":
            self._forward_stage(pipeline, action, microbatch, tally)
        elif action.kind in ("backward", "backward_inputs"):
            with self.watch.region("backward"):
                pipeline.backward(action, tally.scale(action.microbatch))
        elif action.kind == "backward_weights":
            with self.watch.region("backward"), self.watch.region("weights"):
                pipeline.backward_weights(action)
        else:
            with self.watch.region("waiting" if action.kind.startswith("receive") else "transfer"):
                pipeline.transfer(action, to_device(microbatch, self.plan, self.device))

    def _forward_stage(self, pipeline: Pipeline, action: Action, microbatch: Batch, tally: Tally) -> None:
        moved = self._moved(microbatch)
        pipeline.wiring(moved)  # a copy of the module is followed, which draws nothing of this step
        with self.watch.region("forward"), self._drawing(action.microbatch, moved):
            loss = pipeline.forward(action, moved, self._compute, self.objective)
        if loss is not None:
            tally.add_loss(action.microbatch, loss)
        self._dropped_of[action.stage].add_to(tally.dropped)

    def _forward(self, microbatch: Batch, index: int) -> Tensor:
        is_last = index == self.plan.num_microbatches - 1
        prepare_microbatch(self.spread_module, self.plan, is_last)
        if self.host is not None:
            self.host.begin(is_last)
        moved = self._moved(microbatch)
        self._buffers.before_forward()
        with self.watch.region("forward"), self._drawing(index, moved):
            loss = self._loss(moved)
        self._buffers.after_forward()
        return loss

    def _drawing(self, index: int, microbatch: Batch) -> AbstractContextManager[None]:
        """Where numbers are drawn by sample: what is drawn inside is of this microbatch."""
        if self._draws is None:
            return nullcontext()
        return self._draws.microbatch(self.first_step + self.num_steps, index, microbatch)

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

    def _gate_opens(self, tally: Tally) -> bool:
        """Whether there is to be an update; where not, the gradients are forgotten."""
        groups, parameters = (self._pp, self._dp), self.module.parameters()
        if self.gate is None or self.gate.opens(tally.loss_sum, tally.total_count, groups, parameters):
            return True
        self._update.leave_out()
        return False

    def _apply_gradients(self) -> Tensor | None:
        """The norm of the gradients, where they were clipped."""
        if self._finder is not None:
            self._finder.before_update()
        with self.watch.region("update"):
            return self._update.run()


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Parts the user keeps in eval mode stay there afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
