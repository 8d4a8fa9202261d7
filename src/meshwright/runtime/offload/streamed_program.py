"""A Program whose parameters are streamed: the same step, in another order (`streaming.py`).

An update begins while backward still runs. Where a step fails after that, some blocks are updated and others are not: such a
program refuses to go on, and the last checkpoint counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.models.objective import Batch, Objective, map_batch
from meshwright.runtime.clock import Mark, mark
from meshwright.runtime.lowered import narrow
from meshwright.runtime.offload.departures import Departures
from meshwright.runtime.offload.host import HostMemory
from meshwright.runtime.offload.host_updates import HostUpdates, clip_together
from meshwright.runtime.offload.stash import Stash
from meshwright.runtime.offload.streaming import Holdings, Streaming
from meshwright.runtime.precision import LOWER
from meshwright.runtime.program import Program, Spread
from meshwright.runtime.samples import microbatches_of
from meshwright.runtime.step import StepOutput
from meshwright.runtime.synced_buffers import SyncedBuffers
from meshwright.runtime.tally import Tally
from meshwright.runtime.watch import Watch


class TornError(MeshwrightError):
    """A step failed between the updates of two blocks."""


@dataclass(frozen=True)
class Streams:
    """What a streamed program runs with."""

    streaming: Streaming
    departures: Departures
    updates: HostUpdates
    stash: Stash
    memory: tuple[HostMemory, ...]
    group: dist.ProcessGroup | None
    """The ranks that blocks are cut over."""


class StreamedProgram(Program):
    def __init__(
        self, spread: Spread, plan: Plan, objective: Objective, max_norm: float | None, watch: Watch, streams: Streams
    ) -> None:
        super().__init__(spread, plan, objective, max_norm, watch)
        self.streams, self.max_norm = streams, max_norm
        self._buffers = SyncedBuffers(self.module, self._dp, without=streams.streaming.order)
        self._is_torn = False

    def holdings(self) -> Holdings:
        """Bytes on the device and the host."""
        streams = self.streams
        host = sum(memory.num_bytes for memory in streams.memory) + streams.updates.state_bytes
        return streams.streaming.holdings(streams.departures, streams.stash, host)

    def _give_back(self) -> None:
        self.streams.updates.close()
        self.streams.stash.close()
        self.streams.streaming.close()
        for memory in self.streams.memory:
            memory.close()

    def replicated(self) -> dict[str, Tensor]:
        """Without the rows that only this rank has; a step ends when all blocks are updated."""
        homes = self.streams.streaming.homes.values()
        cut = {name for home in homes for member in home.members if member.parts > 1 for name in member.names}
        return {name: parameter for name, parameter in super().replicated().items() if name not in cut}

    def take_over_loaded(self) -> None:
        self.streams.updates.place.take_over()
        self._is_torn = False  # the parameters are of one step again

    def evaluate(self, batches: Iterable[Batch]) -> float:
        streaming = self.streams.streaming
        with streaming.resident.in_place():
            try:
                return super().evaluate(batches)
            finally:
                streaming.window.leave()

    def _moved(self, microbatch: Batch) -> Batch:
        """Floating inputs in the dtype that blocks compute in."""
        moved, lower = super()._moved(microbatch), LOWER.get(self.plan.precision)
        if lower is None:
            return moved
        return map_batch(lambda tensor: narrow(tensor, lower), moved)

    def _step(self, batch: Batch, signal: float) -> StepOutput:
        if self._is_torn:
            raise TornError(
                "an earlier step failed between the updates of two blocks, and the parameters are of two steps: start again from "
                "the last checkpoint"
            )
        marks: list[tuple[str, Mark]] = [("start", mark(self.device))]
        microbatches = microbatches_of(batch, self.plan)
        tally = self._tally(microbatches, signal)
        parts = [partial(self._forward_part, one, index, tally) for index, one in enumerate(microbatches)]
        streaming, streams = self.streams.streaming, self.streams
        streaming.dropped_sums = tally.dropped
        try:
            with streaming.resident.in_place():
                with self.watch.region("forward"):
                    tapes = streaming.forward(parts, streams.stash, looks=self.num_steps == 0 and not self.plan.compile)
                marks.append(("forward", mark(self.device)))
                self._is_torn = True
                with self.watch.region("backward"):
                    streaming.backward(tapes, streams.departures, streams.updates, self.watch)
                marks.append(("backward", mark(self.device)))
            with self.watch.region("update"):
                norm = self._finish_updates()
        except BaseException:
            streaming.give_up()
            streams.updates.give_up()
            raise
        self._is_torn = False
        marks.append(("update", mark(self.device)))
        return tally.output(marks, norm)

    def _forward_part(self, microbatch: Batch, index: int, tally: Tally) -> None:
        """The forward of one microbatch, and backward from its loss to what the last blocks returned."""
        self._buffers.before_forward()
        loss = self._loss(self._moved(microbatch))
        self._buffers.after_forward()
        tally.add_loss(index, loss)
        (loss * tally.scale(index).to(loss.dtype)).backward(retain_graph=True)

    def _finish_updates(self) -> Tensor | None:
        streams, resident = self.streams, self.streams.streaming.resident
        resident.average(streams.group)
        norm = None if self.max_norm is None else self._clip(self.max_norm)
        streams.updates.run_held()
        resident.update(self.optimizer)
        streams.updates.settle()
        return norm

    def _clip(self, max_norm: float) -> Tensor:
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        gradients[False] += [one.grad for one in self.streams.streaming.resident.parameters if one.grad is not None]
        for arrived in self.streams.updates.held:
            arrived.give()
            for member, master in zip(arrived.home.members, arrived.home.masters, strict=True):
                if master.grad is not None:
                    gradients[member.parts > 1].append(master.grad)
        return clip_together(gradients, max_norm, self.streams.group)
