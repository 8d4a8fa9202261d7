"""Follow one forward and backward of a module on fake tensors, op by op.

Every op is seen below autograd by a dispatch mode. The block an op belongs to is the innermost block whose forward is
running; in backward, the last block whose output received its gradient. Storages are watched from birth to death, so the
memory of the step is followed too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.capture.opkinds import base_name, flops_of, kind_of, moves_data
from meshwright.core.errors import CaptureError
from meshwright.core.graph import OpKind, Phase, Precision
from meshwright.models.objective import Batch, Objective, call, map_batch, tensors_of
from meshwright.runtime._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
)


@dataclass(frozen=True)
class TracedOp:
    name: str
    kind: OpKind
    phase: Phase
    dtype: Precision
    block: str
    flops: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True)
class MemoryEvent:
    """A storage is born (bytes > 0) or dies (bytes < 0)."""

    phase: Phase
    block: str
    storage: int
    num_bytes: int


@dataclass
class Recording:
    """What the modes below write down, in order."""

    ops: list[TracedOp] = field(default_factory=list)
    memory: list[MemoryEvent] = field(default_factory=list)
    output_bytes: dict[str, int] = field(default_factory=dict)
    gradient_storages: set[int] = field(default_factory=set)
    batch_bytes: int = 0
    buffer_bytes: int = 0
    gradient_order: list[str] = field(default_factory=list)
    """Parameters in the order their gradients become ready."""


def trace(
    module: nn.Module, batch: Batch, objective: Objective, blocks: Iterable[str], precision: Precision = "fp32"
) -> Recording:
    """One forward, loss and backward. The module's own tensors are neither read nor changed."""
    recording = Recording()
    place = _Place()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        stored = STORED[precision]
        parameters, buffers = (_fake_tensors(found, stored) for found in (_parameters(module), _buffers(module)))
        tensors = parameters | buffers
        inputs = map_batch(lambda tensor: fake.from_tensor(_stored(tensor, stored, precision)), batch)
        recording.buffer_bytes = sum(map(_tensor_bytes, buffers.values()))
        recording.batch_bytes = sum(map(_tensor_bytes, tensors_of(inputs)))
        known = [*tensors.values(), *tensors_of(inputs)]
        handles = _watch_blocks(module, blocks, place, recording) + _watch_gradients(parameters, recording)
        try:
            with _no_collection(), _Watcher(recording, place, known) as watcher:
                _run(module, tensors, inputs, objective, place, precision)
        finally:
            for handle in handles:
                handle.remove()
        gradients = [tensor.grad for tensor in tensors.values() if tensor.grad is not None]
        recording.gradient_storages = {watcher.number_of(gradient) for gradient in gradients}
    return recording


STORED = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32}
"""What parameters are kept in."""
LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What mixed precision computes in."""
_NAMES: dict[torch.dtype, Precision] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


class _Place:
    """Where the step is: its phase and block."""

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self.stack: list[str] = [""]
        self.module = ""

    @property
    def block(self) -> str:
        return self.stack[-1]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector comes at random moments: what it frees would make two traces of one module differ."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Call(nn.Module):
    """A module that can be called with a whole batch, so that its tensors can be replaced for one call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> Any:
        return call(self.inner, batch)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {f"inner.{name}": tensor for name, tensor in module.named_parameters(remove_duplicate=False)}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {f"inner.{name}": tensor for name, tensor in module.named_buffers(remove_duplicate=False)}


def _fake_tensors(named: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Stand-ins, tied ones shared, floating ones in the dtype they are stored in. Called inside the fake mode."""
    made: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in made:
            stored = dtype if tensor.is_floating_point() else tensor.dtype
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=stored, device="cpu")
            made[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    return {name: made[id(tensor)] for name, tensor in named.items()}


def _stored(tensor: Tensor, dtype: torch.dtype, precision: Precision) -> Tensor:
    """Floating inputs follow an fp64 model and stay as they are otherwise, as in the runtime."""
    return tensor.to(dtype) if precision == "fp64" and tensor.is_floating_point() else tensor


def _computing_in(precision: Precision) -> AbstractContextManager[Any]:
    """Mixed precision as the runtime has it: autocast around forward and loss."""
    if precision in LOWER:
        return torch.autocast("cpu", dtype=LOWER[precision])
    return nullcontext()


def _run(
    module: nn.Module,
    tensors: dict[str, Tensor],
    batch: Batch,
    objective: Objective,
    place: _Place,
    precision: Precision,
) -> None:
    try:
        with _computing_in(precision):
            output = torch.func.functional_call(_Call(module), tensors, (batch,))
            loss = objective.loss(output, batch)
        place.phase = "backward"
        place.stack = [""]
        del output
        loss.backward()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"module '{place.module or 'root'}' reads a tensor's value ({error}) while it is followed on fake tensors: "
            "compute that value outside the forward, or write the plan by hand"
        ) from error
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"module '{place.module or 'root'}' failed in {place.phase} on fake tensors: {type(error).__name__}: {error}. "
            "Check that the module takes the example batch; a dict is passed by name without its 'labels'"
        ) from error


def _watch_blocks(module: nn.Module, blocks: Iterable[str], place: _Place, recording: Recording) -> list[Any]:
    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(_entered_module(place, name)))
    for name in blocks:
        part = module.get_submodule(name)
        handles.append(part.register_forward_pre_hook(_entered(place, name), prepend=True, with_kwargs=True))
        handles.append(part.register_forward_hook(_left(place, name, recording)))
    return handles


def _watch_gradients(parameters: dict[str, Tensor], recording: Recording) -> list[Any]:
    first_names = {id(tensor): name for name, tensor in reversed(parameters.items())}

    def ready(tensor: Tensor) -> None:
        recording.gradient_order.append(first_names[id(tensor)].removeprefix("inner."))

    trained = {id(tensor): tensor for tensor in parameters.values() if tensor.requires_grad}
    return [tensor.register_post_accumulate_grad_hook(ready) for tensor in trained.values()]


def _entered_module(place: _Place, name: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        place.module = name

    return hook


def _entered(place: _Place, name: str) -> Callable[..., None]:
    def leave_backward(gradient: Tensor) -> None:
        if place.block == name:
            place.stack = [""]

    def hook(module: nn.Module, arguments: Any, options: Any) -> None:
        place.stack.append(name)
        for tensor in _tensors((arguments, options)):
            if tensor.requires_grad:
                tensor.register_hook(leave_backward)

    return hook


def _left(place: _Place, name: str, recording: Recording) -> Callable[..., None]:
    def enter_backward(gradient: Tensor) -> None:
        place.stack = ["", name]

    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        place.stack.pop()
        tensors = _tensors(output)
        recording.output_bytes[name] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(enter_backward)

    return hook


class _Watcher(TorchDispatchMode):
    """Sees every op, and numbers storages in order of birth: addresses are used again, numbers are not."""

    def __init__(self, recording: Recording, place: _Place, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.place = place
        self.outside = {_key(tensor) for tensor in known}
        self.numbers: dict[int, int] = {}
        self.watched: dict[int, weakref.ref[Any]] = {}
        self.num_born = 0

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = op(*arguments, **options)
        outputs = _tensors(result)
        for tensor in outputs:
            self.watch(tensor)
        if moves_data(op):
            self.recording.ops.append(
                TracedOp(
                    name=base_name(op),
                    kind=kind_of(op),
                    phase=self.place.phase,
                    dtype=_dtype_of(outputs or _tensors((arguments, options))),
                    block=self.place.block,
                    flops=flops_of(op, arguments, options, result),
                    read_bytes=float(sum(map(_tensor_bytes, _tensors((arguments, options))))),
                    written_bytes=float(sum(map(_tensor_bytes, outputs))),
                )
            )
        return result

    def watch(self, tensor: Tensor) -> None:
        """Note a new storage, and its death when it comes."""
        key = _key(tensor)
        if key in self.outside or key in self.numbers:
            return
        number = self.numbers[key] = self.num_born
        self.num_born += 1
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        place, events = self.place, self.recording.memory
        events.append(MemoryEvent(place.phase, place.block, number, num_bytes))

        def died(_: Any) -> None:
            del self.numbers[key], self.watched[key]
            events.append(MemoryEvent(place.phase, place.block, number, -num_bytes))

        self.watched[key] = weakref.ref(storage, died)

    def number_of(self, tensor: Tensor) -> int:
        return self.numbers[_key(tensor)]


def _dtype_of(tensors: list[Tensor]) -> Precision:
    """The first floating dtype; ops on integers alone are rare and small, and count as fp32."""
    return next((_NAMES[tensor.dtype] for tensor in tensors if tensor.dtype in _NAMES), "fp32")


def _tensors(nest: Any) -> list[Tensor]:
    return [item for item in tree_leaves(nest) if isinstance(item, Tensor)]


def _key(tensor: Tensor) -> int:
    """The storage's address in the C++ heap: unique while the storage lives."""
    return StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-any-return]


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
