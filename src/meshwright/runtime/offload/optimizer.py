"""The optimizer of a plan that keeps its state on the host.

    backward     a parameter's gradient is complete: it leaves for the host, and its memory on the device is free    -> _leave
    host thread  updates what has landed, what the next forward needs first before the rest; the new parameter
                 returns at once                                                                              -> _begin, _offer
    forward      a block begins when its parameters are back; what is in no block is waited for at the start         -> _await

With one rank that is how it goes. Where ranks share the work, gradients must first be reduced and settled among them: they
leave at the end of the step. So they do where the loop is the user's own, who may look at them. The result is that of the
optimizer on the device.

clipping     the norm is known when backward ends: gradients leave as above, their updates wait for it
accumulation gradients of each microbatch leave, and are added up in the master's dtype on the host
delayed      the update of step t runs under step t + 1, whose gradients are taken at the parameters before it; they return
             when backward of t + 1 is done
share        the first parameters of a forward keep their state on the device, and are updated there, block by block
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakMethod, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.core.plan import Plan
from meshwright.runtime.clip import local
from meshwright.runtime.lowered import Values
from meshwright.runtime.offload.host_state import HostState
from meshwright.runtime.offload.kept import Kept, update_kept
from meshwright.runtime.offload.link import Link
from meshwright.runtime.offload.pieces import Piece, Return, Shipped, Slot
from meshwright.runtime.offload.rules import State, Task, Wait, find_device_rule
from meshwright.runtime.offload.threads import QuickTurns
from meshwright.runtime.offload.updater import Job, Updater


class _Sum(NamedTuple):
    """A gradient to be added up."""

    piece: Piece
    slot: Slot
    is_measured: bool = False


class _Update(NamedTuple):
    one: Shipped
    piece: Piece
    slot: Slot
    back: Return
    group: State
    """The optimizer's settings when the gradient left: who trains may change them before the update runs."""


class HostOptimizer:
    """Made by `apply` and `wrap` around the user's optimizer, whose groups (learning rates) stay the ones that count."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        plan: Plan,
        link: Link,
        device: torch.device,
        values: Values | None = None,
        max_norm: float | None = None,
        is_own_loop: bool = False,
        num_ranks_here: int = 1,
    ) -> None:
        """values: of parameters that the device has in 16 bits, still without them. max_norm: what gradients that leave early are
        clipped to. is_own_loop: whether the loop around it is the user's."""
        self.module, self.optimizer, self.plan, self.link = module, optimizer, plan, link
        self.leaves_early = plan.world == 1 and plan.precision != "fp16" and not is_own_loop
        self.max_norm = max_norm if self.leaves_early else None
        self.num_steps = 0
        self._is_last = True
        self._scales: dict[int, float] = {}
        self._block = ""
        self._norms: list[Tensor] = []
        self._held: list[Job] = []
        self._ready: list[Kept] = []
        """Parameters on the device whose gradients are complete."""
        sums = plan.num_microbatches > 1 and self.leaves_early
        self.state = HostState(module, optimizer, plan, device, values, sums, num_ranks_here)
        self._device_rule = find_device_rule(optimizer, self.state.layout.is_narrow, device)
        self.updater = Updater(WeakMethod(self._begin))
        self._turns = QuickTurns()
        self.observer: Callable[[str, Tensor], None] | None = None
        """Sees the gradient of each parameter, microbatch by microbatch, where they leave early."""
        self.before_step: Callable[[], None] | None = None
        self._handles = [*self._watch_gradients(), *self._watch_forwards()]
        self._at_exit = finalize(
            self, Updater.close, self.updater
        )  # a thread in native code must not outlive it, or Python

    # ------------------------------------------------------------ what the step calls

    def begin(self, is_last: bool) -> None:
        """Before a microbatch: whether its backward completes the gradients."""
        self._is_last = is_last

    def step(self) -> Tensor | None:
        """The step's gradients are on their way, or ready to leave. The norm they had, where they are clipped here."""
        self.updater.raise_failure()
        if self.before_step is not None:
            self.before_step()
        self._is_last = True
        for one in self.state.holders:
            if one.has_sum and not one.was_sent and one.parameter.grad is None:
                one.parameter.grad = torch.zeros_like(one.parameter)  # the last microbatch had no use for it
            if not one.was_sent and one.parameter.grad is not None:
                self._leave(one)
            if isinstance(one, Shipped) and not one.was_sent:
                self._promote(one)  # it has no gradient this time: what was late for it is late no longer
            one.was_sent = one.has_sum = False
        self._update_kept()
        norm = self._clip()
        for job in self._held:
            self.updater.give(job)
        self._held = []
        self._return_late_ones()
        if self.plan.mesh.pp > 1:
            self._await_all(self.state.pieces)  # stages are run in parts: there is no one forward to wait in
        self._scales = {step: scale for step, scale in self._scales.items() if step >= self.num_steps - 1}
        self.num_steps += 1
        return norm

    def settle(self) -> None:
        """Until every parameter on the device is the newest: a late update comes before its time."""
        self.updater.settle()
        self.link.hold_back()
        for one in self.state.shipped:
            self._promote(one)
        self.rest()

    def rest(self) -> None:
        """Until every update is done, and the parameters on the device are those of the next step: under delayed updates, those
        before the last one."""
        self.updater.settle()
        for piece in self.state.pieces:
            self._await(piece)

    def owe(self, num_steps: int) -> None:
        """As after that many steps: the device has the parameters before the last update, and gets the masters after the next
        backward."""
        self.num_steps = num_steps
        for piece in self.state.pieces:
            slot = piece.slots[(num_steps - 1) % len(piece.slots)]
            piece.late = Return(self.link, piece.on_device, may_go=False)
            piece.late.offer(slot.memory.copy_(piece.master))

    def close(self) -> None:
        """Give back threads and memory."""
        for handle in self._handles:
            handle.remove()
        self._turns.close()
        self._at_exit()
        self.link.close()
        self.state.close()

    @property
    def is_delayed(self) -> bool:
        """Whether the update of the step at hand runs under the next one."""
        return self.plan.offload.delayed and self.num_steps >= self.plan.offload.warmup_steps

    @property
    def is_owing(self) -> bool:
        """Whether the last update is late: the same on all ranks."""
        return self.plan.offload.delayed and self.num_steps > self.plan.offload.warmup_steps

    # ------------------------------------------------------------ gradients leave

    def _leave(self, one: Shipped | Kept) -> None:
        gradient = local(one.parameter.grad)  # type: ignore[arg-type]
        one.parameter.grad = None
        one.was_sent, one.has_sum = self._is_last, not self._is_last
        if self.observer is not None:
            self.observer(one.name, gradient)
        if self.max_norm is not None and self._is_last and self.plan.num_microbatches == 1:
            self._norms.append(torch.linalg.vector_norm(gradient, dtype=self.state.layout.master_dtype))
        if one.block != self._block:  # of the blocks, backward has come to the next
            self._block = one.block
            self._update_kept()
            self.link.pace()
        if isinstance(one, Kept):
            self._keep(one, gradient)
            return
        flat = gradient.reshape(-1)
        for piece in one.pieces:
            part = flat[piece.first : piece.last] if piece.on_device.dim() == 1 else gradient
            self._send(one, piece, part.view_as(piece.on_device))

    def _keep(self, one: Kept, gradient: Tensor) -> None:
        if not self._is_last:
            one.add(gradient)
            return
        one.gradient = one.whole(gradient)
        self._ready.append(one)
        if self.max_norm is not None and self.plan.num_microbatches > 1:
            self._norms.append(torch.linalg.vector_norm(one.gradient, dtype=self.state.layout.master_dtype))

    def _update_kept(self) -> None:
        """What stays on the device, block by block: one launch for many parameters."""
        if self.max_norm is None and self._ready:
            ready, self._ready = self._ready, []
            update_kept(ready, self._device_rule, 1.0)

    def _send(self, one: Shipped, piece: Piece, gradient: Tensor) -> None:
        slot = piece.slots[self.num_steps % len(piece.slots)]
        self.updater.wait_for(slot.is_free)
        slot.is_free.clear()
        arrival = self.link.to_host(gradient, slot.memory)
        number, size = self.num_steps, piece.last - piece.first
        if not self._is_last:
            self.updater.give(Job(number, False, one.place, arrival, size, _Sum(piece, slot)))
            return
        back = Return(self.link, piece.on_device, may_go=not self.is_delayed)
        if not self.is_delayed:
            piece.newest = back
        else:
            piece.newest, piece.late = piece.late or piece.newest, back
        update = Job(number, True, one.place, arrival, size, _Update(one, piece, slot, back, dict(one.group)))
        if self.max_norm is None:
            self.updater.give(update)
            return
        if piece.total is not None:
            self.updater.give(Job(number, False, one.place, arrival, size, _Sum(piece, slot, is_measured=True)))
        self._held.append(update)

    def _clip(self) -> Tensor | None:
        """What the gradients of this step are multiplied with is known now."""
        if self.max_norm is None:
            return None
        if self.state.layout.has_sums:
            self.updater.settle()  # of sums the norms are taken on the host
            self._norms += [piece.norm for piece in self.state.pieces if piece.norm is not None]
        device = self._norms[0].device if self._norms else torch.device("cpu")
        norms = torch.stack([norm.to(device) for norm in self._norms]) if self._norms else torch.zeros(1)
        self._norms = []
        norm: Tensor = torch.linalg.vector_norm(norms)
        scale = float((self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._scales[self.num_steps] = scale
        ready, self._ready = self._ready, []
        update_kept(ready, self._device_rule, scale)
        return norm

    # ------------------------------------------------------------ on the updater's thread

    @torch.no_grad()
    def _begin(self, jobs: list[Job]) -> Callable[[], None]:
        if jobs[0].is_update:
            scale = self._scales.get(jobs[0].step, 1.0)
            updates: list[_Update] = [job.what for job in jobs]
            return partial(self._offer, updates, self.state.rule.begin([self._task(one, scale) for one in updates]))
        for job in jobs:
            self._add(job.what)
        return lambda: None

    def _add(self, job: _Sum) -> None:
        piece = job.piece
        assert piece.total is not None
        self.state.rule.accumulate(piece.total, job.slot.memory, is_first=piece.num_summed == 0)
        piece.num_summed += 1
        if job.is_measured:
            piece.norm = torch.linalg.vector_norm(piece.total)
        job.slot.is_free.set()

    @torch.no_grad()
    def _offer(self, jobs: list[_Update], wait: Wait) -> None:
        """Updated parameters may return."""
        wait()
        for _, piece, slot, back, _ in jobs:
            if self.state.layout.is_narrow:
                back.offer(slot.memory)
            elif len(piece.slots) > 1:
                back.offer(slot.memory.copy_(piece.master))  # the master may change again before this has returned
            else:
                back.offer(piece.master)
            slot.is_free.set()

    def _task(self, job: _Update, scale: float) -> Task:
        _, piece, slot, _, group = job
        gradient = slot.memory
        if piece.num_summed and piece.total is not None:
            if piece.norm is None:  # else the last one is in the sum
                self.state.rule.accumulate(piece.total, slot.memory, is_first=False)
            gradient, piece.num_summed, piece.norm = piece.total, 0, None
        return Task(
            piece.master, piece.state, gradient, slot.memory if self.state.layout.is_narrow else None, group, scale
        )

    # ------------------------------------------------------------ parameters return

    def _promote(self, one: Shipped) -> None:
        """The late update becomes what the next forward waits for."""
        for piece in one.pieces:
            if piece.late is not None:
                piece.late.allow()
                piece.newest, piece.late = piece.late, None

    def _return_late_ones(self) -> None:
        """Backward is over: what was updated under it may take the place of what it used."""
        if not self.plan.offload.delayed:
            return
        self.link.hold_back()
        for piece in self.state.pieces:
            if piece.newest is not None and not piece.newest.may_go:
                piece.newest.allow()

    def _await(self, piece: Piece) -> None:
        """What the device is given from now on sees the newest parameter."""
        back = piece.newest
        if back is None:
            return
        self.updater.wait_for(back.is_on_way)
        back.wait_on_device()
        piece.newest = None

    def _watch_gradients(self) -> Iterable[Any]:
        if not self.leaves_early:
            return
        for one in self.state.holders:
            hook = partial(_call_weakly, WeakMethod(self._leave), ref(one))  # Python sees no cycle through these hooks
            yield one.parameter.register_post_accumulate_grad_hook(hook)

    def _watch_forwards(self) -> Iterable[Any]:
        """A block waits for its own parameters, the whole module for those in no block; for all of them where ranks gather
        parameters ahead of their use."""
        by_block: dict[str, list[Piece]] = {}
        for one in self.state.shipped:
            place = one.block if self.plan.world == 1 else ""
            by_block.setdefault(place, []).extend(one.pieces)
        for name, pieces in by_block.items():
            part = self.module.get_submodule(name)
            yield part.register_forward_pre_hook(partial(_call, self._await_all, pieces), prepend=True)

    def _await_all(self, pieces: Iterable[Piece]) -> None:
        self.link.pace()
        for piece in pieces:
            self._await(piece)


def step_on_host(
    optimizer: Optimizer, host: HostOptimizer, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """`optimizer.step()` of a user's own loop updates on the host; `zero_grad` and the groups stay as they are."""

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        before()
        host.step()
        after()
        return loss

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _call_weakly(work: WeakMethod[Callable[[Any], None]], subject: ref[Any], *_: Any) -> None:
    found, of = work(), subject()
    if found is not None and of is not None:
        found(of)


def _call(work: Any, subject: Any, *_: Any) -> None:
    work(subject)
