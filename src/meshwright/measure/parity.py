"""Parity: a plan against one process, in float64, over several optimizer steps.

Both start from the same weights and see the same global batches, with labels masked unevenly so that a loss normalised by
microbatch instead of by token shows. Compared in every step: the loss, and every parameter's gradient; at the end, every
parameter. A difference counts relative to the largest entry of the reference tensor:

    |a - b|∞ / max(|b|∞, FLOOR · largest gradient of the step)  ≤  SLACK · ε · (number of blocks + 1)

The bound grows with depth and machine epsilon; the floor keeps gradients that are zero but for rounding (the bias of an
attention key) from being compared with themselves. Both sides run inside `exact`, so that no cast of the model's own leaves
float64, and inside `silence`, since two runs could not draw alike. Where the mathematics depends on the local batch (batch norm,
expert capacity), or a forward leaves something behind (a buffer, a counter, a teacher's parameters), the reference runs the same
microbatches one after another, each from the state that the first dp rank has then, as DistributedDataParallel sends it round;
else it runs the global batch at once, and a loss that is not the mean of its parts' is refused for a plan that cuts the batch
(`mean_loss`). Buffers are compared after the last step: the first rank's. Batch norm of a few values enlarges rounding: there,
and where all differences are small, the bound is at least what a move of every parameter by one ε does (`rounding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.codec import Value
from meshwright.core.errors import MeshwrightError, ModelError
from meshwright.core.plan import Plan
from meshwright.measure.called import check_called
from meshwright.measure.carried import carries_state, from_one_state
from meshwright.measure.distance import distance, largest
from meshwright.measure.exact import exact, widened, widened_batch, widened_loss
from meshwright.measure.failing import explained
from meshwright.measure.mean_gradient import refuse_own_gradient
from meshwright.measure.mean_loss import BATCH_NORMS, check_mean_loss, depends_on_batch, masked_unevenly, takes_masked
from meshwright.measure.rounding import GROWTH, MOST, enlarged, move_parameters
from meshwright.measure.silence import silence, silence_modules
from meshwright.models.objective import Batch, Objective, call, map_batch, slice_batch, tensors_of
from meshwright.models.source import ModelSource, resolve
from meshwright.runtime.apply import apply
from meshwright.runtime.deferred import building
from meshwright.runtime.gather import is_so_anywhere, put_together
from meshwright.runtime.mesh import axis_groups
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.places import places_of
from meshwright.runtime.program import Program
from meshwright.runtime.rank import lines_of
from meshwright.runtime.ranks import Rank, joined
from meshwright.runtime.uncompiled import uncompiled
from meshwright.runtime.watchdog import TIMEOUT_SECONDS

SLACK = 4096.0
BATCH_NORM_SLACK = 16.0
"""Times the slack where batch norm divides by the spread of a few values, which makes rounding larger."""
FLOOR = 1e-3
SEED = 1234
Tamper = Callable[[Program], None]


class ParityResult(Value, kw_only=True):
    """Whether a plan does what one process does: the largest differences, their bound, and the first that is above it.

    ok                    parity holds; else first_difference names the first tensor that differs
    max_loss_difference, max_gradient_difference, max_parameter_difference
                          relative to the largest entry of the reference tensor; all within `bound` where parity holds
    losses                of the plan and of one process, step by step
    """

    ok: bool
    max_loss_difference: float
    max_gradient_difference: float
    max_parameter_difference: float
    first_difference: str | None
    bound: float
    num_tensors: int
    losses: tuple[tuple[float, float], ...]
    """Plan and reference, step by step."""
    silenced: tuple[str, ...] = ()
    """Classes of modules and functions that draw random numbers, and gave their mean here."""


@dataclass(frozen=True)
class _Reference:
    module: nn.Module
    optimizer: torch.optim.Optimizer
    in_groups: bool
    """Whether it runs the plan's microbatches one after another."""


def parity_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """What each rank of `meshwright parity` runs."""
    plan = msgspec.convert(payload["plan"], Plan)
    with joined(payload["device"], payload["backend"], payload.get("timeout", TIMEOUT_SECONDS)) as rank:
        return dict(msgspec.to_builtins(compare(resolve(payload["model"]).small(), plan, payload["steps"], rank)))


def compare(source: ModelSource, plan: Plan, num_steps: int, rank: Rank, tamper: Tamper | None = None) -> ParityResult:
    """Run plan and reference side by side. `tamper` may spoil the program: the tests plant errors with it."""
    if source.example is None:
        raise ModelError(f"{source.name} returned a module alone: return (module, batch) so that it can be run")
    with widened_loss(source.objective):
        result = _compare(source, plan, num_steps, rank, tamper)
        if is_so_anywhere(_may_be_rounding(result)):
            result = _compare(source, plan, num_steps, rank, tamper, with_twin=True)
    return result


def _may_be_rounding(result: ParityResult) -> bool:
    """Whether it is worth seeing how much this model enlarges rounding: a loss of small differences does, or a sharp bend."""
    differences = (result.max_loss_difference, result.max_gradient_difference, result.max_parameter_difference)
    return not result.ok and all(difference <= MOST for difference in differences)


def _compare(
    source: ModelSource, plan: Plan, num_steps: int, rank: Rank, tamper: Tamper | None, with_twin: bool = False
) -> ParityResult:
    assert source.example is not None
    check_mean_loss(lambda: _build(source), source.example(plan.global_batch), source.objective, plan)
    batches = source.example(num_steps * plan.global_batch)
    check_called(lambda: _build(source), batches, source.objective, plan)
    reference, silenced = _reference(source, slice_batch(batches, 0, plan.microbatch))
    with explained(plan), building(plan):
        module = _build(source)
    with explained(plan, module):
        program = apply(module, plan, optimizer=_optimizer, objective=source.objective, device=rank.device)
    if tamper is not None:
        tamper(program)
    twin = _moved_twin(source, reference) if with_twin or _has_batch_norm(reference.module) else None
    gradients: dict[str, Tensor] = {}
    _observe(program, gradients)
    slack = SLACK * (BATCH_NORM_SLACK if _has_batch_norm(reference.module) else 1.0)
    masked = masked_unevenly if takes_masked(lambda: _build(source), source.example(2), source.objective) else _as_it_is
    tally = _Tally(bound=slack * torch.finfo(torch.float64).eps * (len(plan.blocks) + 1))
    for step in range(num_steps):
        batch = masked(slice_batch(batches, step * plan.global_batch, (step + 1) * plan.global_batch))
        gradients.clear()
        with _in_one_process(), _surroundings(True, silenced):
            expected = _step(reference, batch, source, plan)
            if twin is not None:
                _step(twin, batch, source, plan)
                tally.enlarge(_gradients(reference.module), _gradients(twin.module))
                _update(twin)
        with explained(plan, program.module), _surroundings(plan.precision == "fp64", None, plan.compile):
            found = program.step(batch).loss
        tally.loss(step, found, expected)
        tally.gradients(step, gradients, _gradients(reference.module))
        _update(reference)
    if program.host is not None:
        program.host.settle()
    held = _of_all_stages(_parameters(program.module, program.mesh), plan)
    if twin is not None:
        tally.enlarge(_parameters(reference.module), _parameters(twin.module))
    tally.parameters(held, _parameters(reference.module))
    program.sync_buffers()
    tally.buffers(_of_all_stages(_buffers(program.module), plan), _buffers(reference.module))
    if is_so_anywhere(tally.unsure is not None):
        raise tally.no_verdict()
    if tally.first is not None and not _runs_in_groups(reference.module, source.objective):
        refuse_own_gradient(lambda: _build(source), masked(source.example(plan.global_batch)), source.objective, plan)
    return msgspec.structs.replace(tally.result(), silenced=tuple(sorted(silenced)))


def _as_it_is(batch: Batch) -> Batch:
    return batch


class OneProcessFailsError(ModelError):
    """The reference itself cannot be run."""


@contextmanager
def _in_one_process() -> Iterator[None]:
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        raise OneProcessFailsError(
            f"one process cannot run the model in float64 on this device: {type(error).__name__}: {error} ({lines_of(error)})"
        ) from error


@contextmanager
def _surroundings(is_exact: bool, silenced: set[str] | None, is_compiled: bool = False) -> Iterator[None]:
    """What a step runs in. silenced: gets the names of functions that would have drawn. is_compiled: by the plan."""
    with ExitStack() as stack:
        if not is_compiled:
            stack.enter_context(uncompiled())
        if is_exact:
            stack.enter_context(exact())
        stack.enter_context(silence(silenced))
        yield


def _observe(program: Program, found: dict[str, Tensor]) -> None:
    """Gradients of a step, whole, as they are when the update begins; those that leave for the host, as they leave."""

    def add(name: str, gradient: Tensor) -> None:
        copy = gradient.to("cpu", copy=True)
        found[name] = found[name] + copy if name in found else copy

    def take(*_: Any) -> None:
        found.update(_of_all_stages(_gradients(program.module, program.mesh), program.plan))

    host = program.host
    if host is None:
        program.optimizer.register_step_pre_hook(take)
    elif host.leaves_early:
        host.observer = add
    else:
        host.before_step = take


def _build(source: ModelSource) -> nn.Module:
    """The model with weights every rank agrees on, and without dropout: two runs could not draw alike."""
    module = _drawing(source)
    silence_modules(module)
    return module


def _drawing(source: ModelSource) -> nn.Module:
    torch.manual_seed(SEED)
    return widened(source.build())


def _reference(source: ModelSource, microbatch: Batch) -> tuple[_Reference, set[str]]:
    """The reference, and the classes of its parts that drew random numbers."""
    module = _drawing(source)
    silenced = silence_modules(module)
    with _surroundings(True, None):
        carries = carries_state(module, lambda: _loss(module, microbatch, source))
    in_groups = carries or _runs_in_groups(module, source.objective)
    return _Reference(module, _optimizer([p for p in module.parameters() if p.requires_grad]), in_groups), silenced


def _moved_twin(source: ModelSource, reference: _Reference) -> _Reference:
    """To see how much the model enlarges rounding; batch norm does."""
    module = _build(source)
    move_parameters(module)
    return _Reference(module, _optimizer([p for p in module.parameters() if p.requires_grad]), reference.in_groups)


# Gradients that are zero but for rounding must not become steps: with the usual eps of 1e-8 they are multiplied by 1e5.
_optimizer = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-5)


def _step(reference: _Reference, batch: Batch, source: ModelSource, plan: Plan) -> float:
    """Loss and gradients of the global batch in one process."""
    rounds = list(_groups(batch, plan)) if reference.in_groups else [[batch]]
    total = sum(source.objective.count(group) for groups in rounds for group in groups)
    loss = 0.0
    for groups in rounds:
        for group in from_one_state(reference.module, groups) if reference.in_groups else groups:
            weighted = _loss(reference.module, group, source) * (source.objective.count(group) / total)
            weighted.backward()
            loss += float(weighted.detach())
    return loss


def _loss(module: nn.Module, batch: Batch, source: ModelSource) -> Tensor:
    moved = widened_batch(batch)
    return source.objective.loss(call(module, moved), moved)


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, BATCH_NORMS) for part in module.modules())


def _runs_in_groups(module: nn.Module, objective: Objective) -> bool:
    return depends_on_batch(module, objective) or _has_batch_norm(module)


def _groups(batch: Batch, plan: Plan) -> Iterator[list[Batch]]:
    """For each microbatch the samples that a batch norm sees together: those of each rank, or of all of them, where the plan
    synchronises them."""
    starts = range(0, plan.global_batch, plan.microbatch)
    for number in range(plan.num_microbatches):
        own = [slice_batch(batch, start, start + plan.microbatch) for start in starts[number :: plan.num_microbatches]]
        yield [_joined(own)] if plan.sync_batch_norm else own


def _joined(batches: list[Batch]) -> Batch:
    """One batch of the samples of several."""
    columns = zip(*map(tensors_of, batches), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return map_batch(lambda _: next(joined), batches[0])


def _update(reference: _Reference) -> None:
    reference.optimizer.step()
    reference.optimizer.zero_grad()


def _gradients(module: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    found = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return _whole({name: gradient for name, gradient in found if gradient is not None}, module, mesh)


def _parameters(module: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    return _whole(dict(module.named_parameters()), module, mesh)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    found = module.named_buffers()
    return {
        name: one.detach().to("cpu", torch.complex128 if one.is_complex() else torch.float64) for name, one in found
    }


def _whole(tensors: Mapping[str, Tensor], module: nn.Module, mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Copies, put together of what the ranks of a mesh hold."""
    groups, places = axis_groups(module, mesh) if mesh else {}, places_of(module)
    return {name: put_together(tensor, places.get(name, ()), groups).cpu().clone() for name, tensor in tensors.items()}


def _of_all_stages(held: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """What each stage holds, put together on every rank; of a tied tensor's copies, each by its own name."""
    if plan.mesh.pp == 1:
        return held
    found: dict[str, Tensor] = {}
    for part in all_ranks(held, dict[str, Tensor]):
        found.update(part)
    return found


class _Tally:
    """Collects differences and remembers the first that is too large."""

    def __init__(self, bound: float) -> None:
        self.bound = self.rounding = bound
        self.first: str | None = None
        self.unsure: str | None = None
        """The first difference that is too large for the bound, and no larger than this model's rounding."""
        self.largest = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}
        self.losses: list[tuple[float, float]] = []
        self.num_tensors = 0

    def enlarge(self, expected: dict[str, Tensor], moved: dict[str, Tensor]) -> None:
        """The bound, to what rounding alone does to this model."""
        self.rounding = max(self.rounding, enlarged(expected, moved, _floor(expected)))
        self.bound = max(self.bound, min(self.rounding, MOST))

    def loss(self, step: int, found: float, expected: float) -> None:
        self.losses.append((found, expected))
        self._note("loss", f"step {step}: loss", abs(found - expected) / max(abs(expected), 1e-30))

    def gradients(self, step: int, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        self._tensors("gradient", f"step {step}: gradient of ", found, expected)

    def parameters(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        self._tensors("parameter", "after the last step: ", found, expected)

    def buffers(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        num_tensors, self.num_tensors = self.num_tensors, 0
        self._tensors("parameter", "after the last step: buffer ", found, expected)
        self.num_tensors = num_tensors

    def _tensors(self, kind: str, words: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        self.num_tensors = len(expected)
        floor = _floor(expected)
        for name, tensor in expected.items():
            if name not in found:
                self._note(kind, f"{words}{name} is missing", float("inf"))
                continue
            if found[name].shape != tensor.shape:
                self._note(
                    kind, f"{words}{name} has shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}", float("inf")
                )
                continue
            scale = max(largest(tensor), floor, 1e-30)
            self._note(kind, f"{words}{name}", distance(found[name], tensor) / scale)

    def _note(self, kind: str, words: str, difference: float) -> None:
        wrong = not difference <= self.bound  # also true for NaN
        if wrong and self.first is None and self.unsure is None:
            if difference <= self.rounding:
                self.unsure = f"{words} differs by {difference:.3g}"
            else:
                self.first = f"{words} differs by {difference:.3g} (bound {self.bound:.3g})"
        self.largest[kind] = difference if difference != difference else max(self.largest[kind], difference)

    def no_verdict(self) -> OneProcessFailsError:
        return OneProcessFailsError(
            f"the model cannot be compared: {self.unsure or 'a result of another rank differs'}, and rounding alone does as much "
            f"(moving every parameter by one ε changes one process' own results by {self.rounding / GROWTH:.1e}). Batch norm of a "
            "few values enlarges it so: give larger microbatches (microbatch=...) or larger images"
        )

    def result(self) -> ParityResult:
        return ParityResult(
            ok=self.first is None,
            max_loss_difference=self.largest["loss"],
            max_gradient_difference=self.largest["gradient"],
            max_parameter_difference=self.largest["parameter"],
            first_difference=self.first,
            bound=self.bound,
            num_tensors=self.num_tensors,
            losses=tuple(self.losses),
        )


def _floor(expected: Mapping[str, Tensor]) -> float:
    return FLOOR * max((largest(tensor) for tensor in expected.values()), default=0.0)
