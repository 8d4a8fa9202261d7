"""Follow one forward, loss and backward of a module on fake tensors, op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capturing.groups import CannotSkip, Group
from meshwright.capturing.guesses import Guesser
from meshwright.capturing.place import Place
from meshwright.capturing.recording import ExitEntry, Recording
from meshwright.capturing.regions import mark_regions
from meshwright.capturing.skip import Skipper
from meshwright.capturing.stand_ins import (
    Arithmetic,
    buffer_bytes,
    buffers_of,
    fake_batch,
    faked_attributes,
    parameters_of,
    stand_ins,
)
from meshwright.capturing.storages import Storages, stored_bytes
from meshwright.capturing.surroundings import quiet_surroundings
from meshwright.capturing.watch import Watcher
from meshwright.core.errors import CaptureError, MeshwrightError
from meshwright.models.location import line_of
from meshwright.models.objective import Batch, Objective, call, num_samples, tensors_of
from meshwright.models.own_recompute import own_recompute_left_out
from meshwright.runtime._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    tree_leaves,
)


def trace(
    module: nn.Module,
    batch: Batch,
    objective: Objective,
    blocks: dict[str, bool],
    arithmetic: Arithmetic,
    groups: Sequence[Group] = (),
) -> Recording:
    """The module's own tensors are neither read nor changed. groups: blocks of which a few stand for all."""
    recording = Recording()
    place = Place(module, blocks)
    storages = Storages(recording, place)
    with FakeTensorMode(allow_non_fake_inputs=True):
        skipped = {name for group in groups for name in group.skipped}
        parameters = stand_ins(parameters_of(module, skipped), arithmetic)
        buffers = stand_ins(buffers_of(module, skipped), arithmetic)
        inputs = fake_batch(batch, arithmetic)
        recording.buffer_bytes = buffer_bytes(module, arithmetic)
        recording.batch_bytes = sum(map(stored_bytes, tensors_of(inputs)))
        storages.know(parameters | buffers)
        storages.know_batch(tensors_of(inputs))
        guesser = Guesser(recording, place, storages, num_samples(batch))
        guesser.known.begin(zip(tensors_of(batch), tensors_of(inputs), strict=True))
        watcher = Watcher(recording, place, storages, guesser)
        skipper = Skipper(recording, place, storages)
        with (
            quiet_surroundings(module),
            faked_attributes(module, arithmetic),
            _noting(parameters, recording),
            place.watching(_left(recording, storages)),
            skipper.guarding(module, groups),
            _not_reached(module, groups),
            watcher,
        ):
            _run(_Step(module, objective, arithmetic, storages), parameters | buffers, inputs)
        gradients = (tensor.grad for tensor in parameters.values() if tensor.grad is not None)
        recording.gradient_storages = {stored.number for grad in gradients if (stored := storages.find(grad))}
    recording.entered = place.entered_blocks
    mark_regions(recording, module)
    return recording


_READING = (".numpy()", "data pointer", "data_ptr")
"""Words of the errors torch raises when memory is read that is not there."""


class _Step(nn.Module):
    """Forward, loss and backward as one call of a module, so that its tensors are replaced for all of it: recompute
    calls parts of it again in backward."""

    def __init__(self, inner: nn.Module, objective: Objective, arithmetic: Arithmetic, storages: Storages) -> None:
        super().__init__()
        self.inner = inner
        self.objective = objective
        self.arithmetic = arithmetic
        self.storages = storages

    def forward(self, batch: Batch) -> None:
        with self.arithmetic.computing(), own_recompute_left_out() as found:
            output = call(self.inner, batch)
            loss = self.objective.loss(output, batch)
        self.storages.recording.own_recompute = found.num_calls > 0
        self.storages.place.begin_backward()
        del output
        self.storages.note_saved()
        loss.backward()


def _run(step: _Step, tensors: dict[str, Tensor], batch: Batch) -> None:
    named = {f"inner.{name}": tensor for name, tensor in tensors.items()}
    try:
        torch.func.functional_call(step, named, (batch,))
        if step.storages.gone_early is not None:
            raise CannotSkip(step.storages.gone_early)
    except (MeshwrightError, CannotSkip):
        raise
    except Exception as error:
        if step.storages.recording.representatives:
            raise CannotSkip from error
        raise _explained(error, step.storages.place) from error
    finally:
        step.storages.close()


def _instead(said: str) -> str:
    if "pack_padded_sequence" in said:
        return "give the LSTM or GRU the padded tensor itself, and read its output at each sample's length"
    return "compute that value outside the forward"


def _explained(error: Exception, place: Place) -> CaptureError:
    line = line_of(error)
    where = f"module '{place.stopped_at or 'root'}'" + (f" ({line})" if line else "")
    unknown = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if unknown or any(word in str(error) for word in _READING):
        return CaptureError(
            f"{where} reads a tensor's value ({error}), which fake tensors do not have, in a way that cannot be guessed: "
            f"{_instead(str(error))}, or write the plan by hand"
        )
    return CaptureError(
        f"{where} failed in {place.phase} on fake tensors: {type(error).__name__}: {error}. "
        "Check that the module takes the example batch; a dict is passed by name without its 'labels'"
    )


def _left(recording: Recording, storages: Storages) -> Callable[[str, Any], None]:
    """Note what a block hands on: the storages of its output that were born in it."""

    def left(block: str, output: Any) -> None:
        entry = recording.log[-1] if recording.log else None
        if entry is None or entry.block != block or block in recording.representatives:
            return
        found = {id(s): s for s in map(storages.find, _tensors(output)) if s is not None and s.block == block}
        recording.log.append(ExitEntry(entry.phase, block, sum(stored.num_bytes for stored in found.values())))

    return left


@contextmanager
def _not_reached(module: nn.Module, groups: Sequence[Group]) -> Iterator[None]:
    """Parameters of skipped blocks have no stand-in: a model that reads them from outside (a penalty on all weights) would write
    gradients into the user's own, and its blocks must all be followed."""
    own = [
        (group, parameter, parameter.grad)
        for group in groups
        for name in group.skipped
        for parameter in module.get_submodule(name).parameters()
    ]
    try:
        yield
    finally:
        reached = [group for group, parameter, before in own if parameter.grad is not before]
        for _, parameter, before in own:
            parameter.grad = before
    if reached:
        raise CannotSkip(reached[0])


def _tensors(nest: Any) -> list[Tensor]:
    return [item for item in tree_leaves(nest) if isinstance(item, Tensor)]


@contextmanager
def _noting(parameters: dict[str, Tensor], recording: Recording) -> Iterator[None]:
    """Note the order in which gradients become ready; a tied parameter goes by its first name."""
    names = {id(tensor): name for name, tensor in reversed(parameters.items())}

    def ready(tensor: Tensor) -> None:
        recording.gradient_order.append(names[id(tensor)])

    trained = {id(tensor): tensor for tensor in parameters.values() if tensor.requires_grad}
    handles = [tensor.register_post_accumulate_grad_hook(ready) for tensor in trained.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
