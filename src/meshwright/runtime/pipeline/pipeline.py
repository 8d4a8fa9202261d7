"""A Pipeline: the stages of one pp coordinate, and the actions of a schedule they take.

| action            | does                                                                                             |
|-------------------|--------------------------------------------------------------------------------------------------|
| forward           | run the stage on what has arrived; keep what it sends until the gradient comes back              |
| send, receive     | every tensor that crosses the cut, in order; nothing where two stages share the coordinate       |
| backward          | from the gradients of what was sent (the last stage: from the loss) to those of what arrived     |
| backward_inputs   | the same, weights' gradients put off                                                             |
| backward_weights  | those that were put off                                                                          |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.core.pipeline.schedule import Action
from meshwright.core.plan import Plan
from meshwright.models.block_hooks import recorders_apart
from meshwright.models.fakes import unchecked_distributions
from meshwright.models.follow import give_number
from meshwright.models.objective import Batch, Objective, call, tensors_of
from meshwright.models.sketch import Sketch
from meshwright.rules.schedules import make_schedule, receipts, receives_ahead
from meshwright.runtime._torch import around_calls
from meshwright.runtime.communicators import state_mesh
from meshwright.runtime.data_parallel import give_up_gathered
from meshwright.runtime.pipeline.arrivals import Arrivals
from meshwright.runtime.pipeline.cut import Cut, stage_of_blocks
from meshwright.runtime.pipeline.forms import form_of
from meshwright.runtime.pipeline.links import Coming, Links
from meshwright.runtime.pipeline.run import LeftEarly, StageRun
from meshwright.runtime.pipeline.state import StageState
from meshwright.runtime.pipeline.tied import TiedTensors
from meshwright.runtime.pipeline.weights import WeightsLater
from meshwright.runtime.pipeline.wiring import Wiring, lay_out
from meshwright.runtime.read_outside import read_outside
from meshwright.runtime.split.layout import lay, layout_of
from meshwright.runtime.synced_buffers import SyncedBuffers

Context = Callable[[], AbstractContextManager[Any]]
Key = tuple[int, int]
"""Stage and microbatch."""


@dataclass
class InFlight:
    """What a stage keeps of one microbatch between forward and backward."""

    wiring: Wiring
    arrivals: Arrivals
    sent: dict[int, Tensor]
    loss: Tensor | None


@dataclass
class Post:
    """Tensors between two actions: activations and gradients, by the stage and microbatch that use or made them."""

    arrived: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    leaving: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    gradients_arrived: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    gradients_leaving: dict[Key, dict[int, Tensor]] = field(default_factory=dict)


class Pipeline:
    def __init__(
        self, module: nn.Module, plan: Plan, mesh: DeviceMesh, sketch: Sketch, found: Cut, objective: Objective
    ) -> None:
        """Made when blocks are marked for recompute and compiled, and before anything is sharded."""
        self.module, self.plan, self.sketch = module, plan, sketch
        self.objective = objective
        """As the user gave it: a compiled one cannot be followed."""
        self.here = mesh.get_local_rank("pp")
        self.num_stages = len(plan.stages)
        self.mine = [number for number, stage in enumerate(plan.stages) if stage.coordinate == self.here]
        self.tied = TiedTensors(module, found.ties, plan, mesh)
        self.tied.copy_first()
        ranks = state_mesh(plan, mesh) if plan.zero else mesh["dp"]
        self.states = {number: StageState(module, found.stages[number], plan, mesh, ranks) for number in self.mine}
        self.buffers = {
            number: SyncedBuffers(state.held, mesh.get_group("dp"), keeps_graphs=True)
            for number, state in self.states.items()
        }
        schedule = make_schedule(plan.schedule, plan.mesh.pp, plan.num_microbatches, plan.virtual)
        self.later = WeightsLater() if schedule.splits_backward else None
        self.last_backward = schedule.last_backwards(self.here)
        self.links = Links(plan, mesh, sketch.device)
        self.ahead = receives_ahead(schedule.actions[self.here])
        self.receipts = receipts(schedule.actions, self.here)
        self.coming: dict[Action, tuple[tuple[int, ...], Coming]] = {}
        """Messages that were asked for, with the numbers of their tensors."""
        self.wirings: dict[Hashable, Wiring] = {}
        self.in_flight: dict[Key, InFlight] = {}
        self.post = Post()
        self.most_in_flight = 0
        """The most microbatches this coordinate held at once, counted in those of one of its stages."""
        self._run: StageRun | None = None
        for name in sketch.blocks:
            around_calls(module.get_submodule(name), partial(partial, self._call_block, name))

    # ------------------------------------------------------------ forward

    def forward(self, action: Action, batch: Batch, compute: Context, objective: Objective) -> Tensor | None:
        """The loss, on the last stage."""
        key = (action.stage, action.microbatch)
        wiring = self.wiring(batch)
        arrivals = Arrivals(self.post.arrived.pop(key, {}), wiring.needs_gradient)
        run = StageRun(wiring, action.stage, arrivals.tensors, self.sketch.fakes)
        buffers = self.buffers[action.stage]
        trains = torch.is_grad_enabled()
        if trains:
            buffers.before_forward()
        with self.later or nullcontext(), compute():
            made: tuple[dict[int, Tensor], Tensor | None] = self.states[action.stage].held(
                batch, partial(self._run_stage, run, objective)
            )
        sent, loss = made
        if trains:
            buffers.after_forward()
            self.in_flight[key] = InFlight(wiring, arrivals, sent, loss)
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        following = (action.stage + 1, action.microbatch)
        if self._is_here(following[0]):
            self.post.arrived[following] = {n: lay(t.detach(), layout_of(t)) for n, t in sent.items()}
        else:
            self.post.leaving[key] = sent
        return loss

    def _run_stage(self, run: StageRun, objective: Objective, batch: Batch) -> tuple[dict[int, Tensor], Tensor | None]:
        self._run = run
        loss = None
        try:
            with self._parameters_in_place(run), unchecked_distributions(), run:
                output = call(self.module, batch)
            run.end()
            if run.stage == self.num_stages - 1:
                loss = objective.loss(output, batch)
        except LeftEarly:
            pass
        finally:
            self._run = None
        return {number: run.sent[number] for number in run.wiring.sent(run.stage)}, loss

    @contextmanager
    def _parameters_in_place(self, run: StageRun) -> Iterator[None]:
        """Parameters that are read outside their block: numbered, or where they crossed to this stage, put in their place."""
        placed = []
        for name, number in run.wiring.parameters.items():
            path, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if number in run.arrived:
                placed.append((vars(owner), leaf, vars(owner).get(leaf)))
                vars(owner)[leaf] = give_number(run.arrived[number], number)
                continue
            own = give_number(getattr(owner, leaf), number)
            if number in run.wanted:
                if isinstance(own, DTensor):
                    raise read_outside(name)
                run.sent[number] = own
        shown = [place for path in _owners(run.wiring.parameters) for place in self._show(path)]
        try:
            yield
        finally:
            for owner, leaf in shown:
                del owner._parameters[leaf]
            for attributes, leaf, before in placed:
                attributes.pop(leaf) if before is None else attributes.update({leaf: before})

    def _show(self, path: str) -> Iterator[tuple[nn.Module, str]]:
        """Parameters of other stages are among a module's own again, in the order they had: code may go over all of them."""
        owner, order = self.module.get_submodule(path), list(self.sketch.module.get_submodule(path)._parameters)
        hidden = [leaf for leaf in order if leaf not in owner._parameters]
        for leaf in order if hidden else ():
            owner._parameters[leaf] = owner._parameters.pop(leaf) if leaf not in hidden else vars(owner)[leaf]
        return ((owner, leaf) for leaf in hidden)

    def _call_block(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Outside of a stage's run a block is what it is."""
        if self._run is None:
            return call(*arguments, **options)
        block = self.module.get_submodule(name)
        return recorders_apart(block, partial(self._run.block, name, block, call, arguments, options), arguments)

    def wiring(self, batch: Batch) -> Wiring:
        """How a batch of this shape goes over the stages; found once."""
        key = (torch.is_grad_enabled(), self.module.training, *_signature(batch))
        if key not in self.wirings:
            self.sketch.train_like(self.module)
            steps = self.sketch.follow(batch, self.objective)
            self.wirings[key] = lay_out(steps, stage_of_blocks(self.plan), self.num_stages, key)
        return self.wirings[key]

    # ------------------------------------------------------------ backward

    def backward(self, action: Action, scale: Tensor) -> None:
        """scale: of the loss. Whole, or for inputs."""
        key, whole = (action.stage, action.microbatch), action.kind == "backward"
        flight = self.in_flight[key]
        state, is_last = self.states[action.stage], action == self.last_backward[action.stage]
        state.before_backward(is_last, whole)
        roots, gradients = self._roots(key, flight, scale)
        if self.later is not None:
            self.later.owner = None if whole else key
        if roots:
            torch.autograd.backward(roots, gradients)
        self._hand_back(key, flight.arrivals.gradients())
        if whole:
            del self.in_flight[key]
            state.after_backward(is_last, whole)
        else:
            flight.sent, flight.loss = {}, None

    def backward_weights(self, action: Action) -> None:
        assert self.later is not None
        key = (action.stage, action.microbatch)
        self.later.run(key)
        del self.in_flight[key]
        self.states[action.stage].after_backward(action == self.last_backward[action.stage], whole=False)

    def _roots(self, key: Key, flight: InFlight, scale: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        if flight.loss is not None:
            return [flight.loss * scale.to(flight.loss.dtype)], [None]
        arrived = self.post.gradients_arrived.pop(key, {})
        numbers = [number for number in arrived if flight.sent[number].requires_grad]
        return [flight.sent[number] for number in numbers], [arrived[number] for number in numbers]

    def _hand_back(self, key: Key, gradients: dict[int, Tensor]) -> None:
        stage, microbatch = key
        if self._is_here(stage - 1):
            self.post.gradients_arrived[stage - 1, microbatch] = gradients
        else:
            self.post.gradients_leaving[key] = gradients

    # ------------------------------------------------------------ transfers

    def look_ahead(self, place: int, batch_of: Callable[[int], Batch]) -> None:
        """Before the piece of work at this place of the row: ask for the messages of the next one, as far as their form is
        known. batch_of: a microbatch by its number."""
        for receive in self.ahead.get(place, ()):
            if not self._is_known(receive, batch_of):
                break  # it is asked for in its own place, and what comes after it on its link after it
            self._ask(receive, batch_of(receive.microbatch))

    def _is_known(self, receive: Action, batch_of: Callable[[int], Batch]) -> bool:
        if receive.kind == "receive_backward":
            return (receive.stage, receive.microbatch) in self.in_flight
        return (receive.stage - 1, self.wiring(batch_of(receive.microbatch)).signature) in self.links.known

    def transfer(self, action: Action, batch: Batch) -> None:
        """batch: the microbatch, whose shape says what crosses."""
        stage, key = action.stage, (action.stage, action.microbatch)
        if action.kind == "send_forward":
            sent = list(self.post.leaving.pop(key).values())
            self.links.send(self._home(stage + 1), sent, (stage, self.wiring(batch).signature), action)
        elif action.kind == "send_backward":
            self.links.send_like(self._home(stage - 1), list(self.post.gradients_leaving.pop(key).values()), action)
        else:
            self._receive(action, batch)

    def _receive(self, action: Action, batch: Batch) -> None:
        if action not in self.coming:
            self._ask(action, batch)
        numbers, coming = self.coming.pop(action)
        place = self.post.arrived if action.kind == "receive_forward" else self.post.gradients_arrived
        place[action.stage, action.microbatch] = dict(zip(numbers, self.links.take(coming), strict=True))
        if torch.is_grad_enabled():
            self.links.release(self.receipts.get(action, ()))

    def _ask(self, action: Action, batch: Batch) -> None:
        if action.kind == "receive_backward":
            flight = self.in_flight[action.stage, action.microbatch]
            numbers = tuple(n for n in flight.sent if n in flight.wiring.needs_gradient)
            forms = tuple(form_of(flight.sent[number]) for number in numbers)
            self.coming[action] = numbers, self.links.ask(self._home(action.stage + 1), forms)
            return
        source, wiring = self._home(action.stage - 1), self.wiring(batch)
        numbers, kind = tuple(wiring.received(action.stage)), (action.stage - 1, wiring.signature)
        if numbers:
            self.links.read_header(source, kind)
        self.coming[action] = numbers, self.links.ask(source, self.links.known[kind] if numbers else ())

    def _home(self, stage: int) -> int:
        return self.plan.stages[stage].coordinate

    def _is_here(self, stage: int) -> bool:
        return 0 <= stage < self.num_stages and self._home(stage) == self.here

    # ------------------------------------------------------------ the step

    def finish_gradients(self) -> None:
        """Before the update: everything sent has left, every gradient is summed."""
        self.links.finish()
        for state in self.states.values():
            state.finish()
        self.tied.add_gradients()

    def evaluate(self, batch: Batch, index: int, compute: Context, objective: Objective) -> Tensor | None:
        """The loss of one microbatch without training, on the last stage. What the one before it sent is waited for: no
        message comes back that would tell."""
        loss, under_way = None, len(self.links.under_way)
        for stage in self.mine:
            if stage and not self._is_here(stage - 1):
                self.transfer(Action("receive_forward", stage, index), batch)
            loss = self.forward(Action("forward", stage, index), batch, compute, objective)
            if stage + 1 < self.num_stages and not self._is_here(stage + 1):
                self.transfer(Action("send_forward", stage, index), batch)
            self.post.leaving.clear()
        self.links.finish(under_way)
        return loss

    def give_up_gathered(self) -> None:
        for state in self.states.values():
            give_up_gathered(state.held)


def _signature(batch: Batch) -> tuple[Hashable, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch))


def _owners(parameters: Iterable[str]) -> list[str]:
    """Paths of the modules that hold them."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
