"""Updates of streamed blocks on the host, in a thread of their own, while the device goes on with backward.

A block's gradients arrive in a buffer of the host, its masters are updated by the compiled Adam or by the user's own optimizer
(`rules.py` says which), and its working copy follows. There are a few buffers: backward waits when all are full. Where gradients
are clipped, their norm is known only when all have arrived: then every block has a buffer, and updates run at the end. An
optimizer with hooks is stepped between blocks, not beside them: a hook may read gradients that backward is just writing.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.runtime._torch import has_step_hooks
from meshwright.runtime.offload.block_home import BlockHome
from meshwright.runtime.offload.host import HostMemory
from meshwright.runtime.offload.link import Arrival
from meshwright.runtime.offload.optimizer_part import Parts, step_of_class
from meshwright.runtime.offload.pieces import MOMENTS
from meshwright.runtime.offload.rules import AdamRule, Task, Wait, find_rule
from meshwright.runtime.offload.threads import QuickTurns

NUM_BUFFERS = 5
"""Two that arrive, two that are used, one that is free for the next."""
PATIENCE_SECONDS = 1.0
"""How long backward waits for a buffer without asking whether an update has failed."""


@dataclass(frozen=True)
class Arrived:
    """The gradients of a block, on the host or on their way."""

    home: BlockHome
    given: frozenset[int] | None
    """Numbers of the members that have a gradient; None where ranks have added up, and the buffer says so behind the gradients."""
    buffer: Tensor
    arrival: Arrival

    def used(self) -> frozenset[int]:
        """Numbers of the members that have a gradient, when all has arrived."""
        if self.given is not None:
            return self.given
        return frozenset(self.buffer[self.home.local_elements : self.home.num_sent].nonzero().flatten().tolist())

    def give(self) -> None:
        """To the masters, as an optimizer looks for them."""
        self.arrival.wait_on_host()
        used = self.used()
        for number, (master, view) in enumerate(
            zip(self.home.masters, self.home.local_views(self.buffer), strict=True)
        ):
            master.grad = view if number in used else None

    def take_back(self) -> None:
        for master in self.home.masters:
            master.grad = None


class StatePlace(ABC):
    """Where masters and optimizer state of blocks are kept between updates."""

    @abstractmethod
    def request(self, home: BlockHome) -> None:
        """The block is updated soon."""

    @abstractmethod
    def at_hand(self, home: BlockHome) -> AbstractContextManager[None]:
        """Its masters and state are in memory."""

    @abstractmethod
    def commit(self) -> None:
        """A step is done."""

    @abstractmethod
    def rest(self) -> None:
        """A step has failed: masters and state are those of the last step that was done, as far as they are known."""

    @abstractmethod
    def take_over(self) -> None:
        """Masters and state were loaded: what the optimizer has of them now is kept."""

    @abstractmethod
    def close(self) -> None: ...

    def zeros_like(self, master: Tensor) -> Tensor:
        """What a state begins with."""
        return torch.zeros_like(master, memory_format=torch.preserve_format)


class InMemory(StatePlace):
    """They are always at hand."""

    def __init__(self, memory: HostMemory | None = None) -> None:
        """memory: for what Adam keeps, in large pages. Where there is none, or no more, torch finds a place."""
        self._memory = memory

    def zeros_like(self, master: Tensor) -> Tensor:
        if self._memory is None or not self._memory.has_room(master.numel(), master.dtype):
            return super().zeros_like(master)
        return self._memory.take(master.numel(), master.dtype).view(master.shape)

    def request(self, home: BlockHome) -> None:
        pass

    def at_hand(self, home: BlockHome) -> AbstractContextManager[None]:
        return nullcontext()

    def commit(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def take_over(self) -> None:
        pass

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = None


class HostUpdates:
    def __init__(
        self, optimizer: Optimizer, buffers: Iterable[Tensor], waits_for_all: bool, place: StatePlace, threads: int = 1
    ) -> None:
        """waits_for_all: updates run when they are told to (`run_held`), not as gradients arrive."""
        self.optimizer, self.waits_for_all, self.place = optimizer, waits_for_all, place
        self._rule = find_rule(optimizer, optimizer.param_groups[0]["params"][0].dtype, threads)
        self.held: list[Arrived] = []
        self._free: queue.Queue[Tensor] = queue.Queue()
        for buffer in buffers:
            self._free.put(buffer)
        self._worker = ThreadPoolExecutor(1, "host-update", partial(torch.set_num_threads, threads))
        self._turns = QuickTurns()
        self._parts = Parts(optimizer)
        self._views: dict[tuple[tuple[torch.Size, ...], int], list[Tensor]] = {}
        """By shapes and the memory they lie in."""
        self._running: list[Future[None]] = []
        self._begun: tuple[Arrived, Wait] | None = None
        """The worker's own: an update that runs, and is not finished."""

    @property
    def state_bytes(self) -> int:
        """Of the host's memory that the optimizer keeps beside the masters."""
        if not isinstance(self.place, InMemory):
            return 0
        kept = [one for state in self.optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
        return sum(one.numel() * one.element_size() for one in kept if one.device.type == "cpu" and one.dim())

    def take_buffer(self) -> Tensor:
        """Waits until one is free; where an update has failed, that is raised instead."""
        while True:
            try:
                return self._free.get(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                for one in self._running:
                    if one.done():
                        one.result()

    def submit(self, arrived: Arrived) -> None:
        """Update a block when its gradients are there; settings of the optimizer are those of now."""
        if self.waits_for_all:
            self.held.append(arrived)
        else:
            self._start(arrived)

    def run_held(self) -> None:
        held, self.held = self.held, []
        for arrived in held:
            self._start(arrived)

    def _start(self, arrived: Arrived) -> None:
        self.place.request(arrived.home)
        part = self._parts.of(arrived.home.masters)
        if has_step_hooks(self.optimizer):
            self._update(arrived, partial(self._step, arrived, part))
            return
        if not isinstance(self._rule, AdamRule):
            work = partial(self._update, arrived, partial(self._step, arrived, part))
        elif isinstance(self.place, InMemory):
            work = partial(self._begin, arrived, part, self._rule)
        else:
            work = partial(self._update, arrived, partial(self._update_compiled, arrived, part, self._rule))
        self._running.append(self._worker.submit(work))

    def settle(self) -> None:
        """Until all that were submitted are done; what went wrong is raised here."""
        running, self._running = [*self._running, self._worker.submit(self._finish)], []
        for future in running:
            future.result()
        self._parts.forget()
        self.place.commit()

    def give_up(self) -> None:
        """After an error: nothing runs any more."""
        running, self._running, self.held = [*self._running, self._worker.submit(self._finish)], [], []
        for future in running:
            future.exception()
        self._parts.forget()
        self.place.rest()

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._turns.close()
        self._rule.close()
        self.place.close()

    def _update(self, arrived: Arrived, update: Callable[[], None]) -> None:
        try:
            arrived.arrival.wait_on_host()
            with self.place.at_hand(arrived.home):
                update()
        finally:
            arrived.take_back()
            self._free.put(arrived.buffer)

    def _begin(self, arrived: Arrived, part: Optimizer, rule: AdamRule) -> None:
        """The next block's update begins before the last one's is finished: the interpreter may be busy in between."""
        try:
            arrived.arrival.wait_on_host()
            wait = rule.begin(self._tasks(arrived, part))
        except BaseException:
            self._free.put(arrived.buffer)
            raise
        before, self._begun = self._begun, (arrived, wait)
        self._finish_one(before)

    def _finish(self) -> None:
        begun, self._begun = self._begun, None
        self._finish_one(begun)

    def _finish_one(self, begun: tuple[Arrived, Wait] | None) -> None:
        if begun is None:
            return
        arrived, wait = begun
        try:
            wait()
            self._refresh(arrived.home)
        finally:
            arrived.take_back()
            self._free.put(arrived.buffer)

    def _step(self, arrived: Arrived, part: Optimizer) -> None:
        """By the optimizer itself."""
        arrived.give()
        step_of_class(part)
        arrived.home.refresh()

    def _update_compiled(self, arrived: Arrived, part: Optimizer, rule: AdamRule) -> None:
        rule.update(self._tasks(arrived, part))
        self._refresh(arrived.home)

    @torch.no_grad()
    def _tasks(self, arrived: Arrived, part: Optimizer) -> list[Task]:
        """One pass over memory, which writes the working copy too."""
        home = arrived.home
        groups = {id(one): group for group in part.param_groups for one in group["params"]}
        narrow = self._views_of(home, home.working) if _is_written_at_once(home) else [None] * len(home.masters)
        views, used = self._views_of(home, arrived.buffer), arrived.used()
        return [
            Task(master, self._state(master), view, new, groups[id(master)], scale=1.0)
            for number, (master, view, new) in enumerate(zip(home.masters, views, narrow, strict=True))
            if number in used and id(master) in groups
        ]

    def _state(self, master: nn.Parameter) -> dict[str, Any]:
        """What Adam keeps for a parameter, as torch's own begins it."""
        state: dict[str, Any] = self.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: self.place.zeros_like(master) for name in MOMENTS}
        return state

    def _views_of(self, home: BlockHome, flat: Tensor) -> Sequence[Tensor]:
        """Of its working copy or a buffer, made once for blocks that are alike: the interpreter is wanted by whoever drives the
        device."""
        key = (home.local_shapes, flat.data_ptr())
        if key not in self._views:
            self._views[key] = home.local_views(flat)
        return self._views[key]

    def _refresh(self, home: BlockHome) -> None:
        if not _is_written_at_once(home):
            home.refresh()


def _is_written_at_once(home: BlockHome) -> bool:
    """Whether the compiled Adam writes the working copy beside the master."""
    return home.working.dtype == torch.bfloat16 and home.masters[0].dtype == torch.float32


def clip_together(gradients: Mapping[bool, list[Tensor]], max_norm: float, group: Any) -> Tensor:
    """Scale gradients to a global norm; True: those of which each rank of the group has its own part. Returns the norm they had."""
    import torch.distributed as dist

    squares = {
        is_part: sum((one.double().square().sum().cpu() for one in found), torch.zeros((), dtype=torch.float64))
        for is_part, found in gradients.items()
    }
    own = squares.get(True, torch.zeros((), dtype=torch.float64))
    if group is not None:
        device = next((one.device for found in gradients.values() for one in found if one.is_cuda), own.device)
        moved = own.to(device)
        dist.all_reduce(moved, group=group)
        own = moved.cpu()
    norm = (own + squares.get(False, 0.0)).sqrt()
    coefficient = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    if coefficient < 1.0:
        for found in gradients.values():
            for one in found:
                one.mul_(coefficient)
    return norm
