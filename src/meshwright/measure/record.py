"""Record one step: memory by category at its peak, and the collectives it called. Run → Sample.

torch's profiler reports every allocation and release with its address; a dispatch mode sees every c10d call. A tensor's
category is read off its address and life:

    parameters, optimizer_state, inputs    held before the step began
    gathered_parameters                    seen as a module's parameter in forward, but not held before
    gradients                              seen as a parameter's gradient after the last backward
    activations                            born inside a forward, alive when it ends
    temporaries                            all else
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from meshwright.core.collective import Collective, CollectiveKind, total
from meshwright.core.estimate import MemoryParts
from meshwright.models.objective import Batch, tensors_of
from meshwright.runtime._torch import TorchDispatchMode, tree_leaves
from meshwright.runtime.clip import local
from meshwright.runtime.optimizer import state_tensors
from meshwright.runtime.program import Program, Sample

COLLECTIVE_CALLS: dict[str, tuple[CollectiveKind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
}
"""c10d op → kind, and which argument is the input tensor."""


@dataclass(frozen=True)
class Allocation:
    """A stretch of memory from its birth to its death (or the end of the step), in profiler time."""

    address: int
    num_bytes: int
    born: float
    died: float


class StepRecorder:
    """Watches one step of a Program through torch's profiler."""

    def record(self, program: Program, batch: Batch, run: Callable[[], Any]) -> tuple[Any, Sample]:
        held = _held(program, batch)
        witness = _Witness(program)
        with witness, _CollectiveWatch() as watch, _profiled(program.device) as profiler:
            result = run()
        events = _read(profiler)
        allocations = _allocations(events, program.device)
        parts = _peak_parts(allocations, held, witness, _regions(events, "meshwright/forward"))
        return result, Sample(peak_bytes=parts.total, memory_bytes=parts, collectives=total(watch.found))


@contextmanager
def _profiled(device: torch.device) -> Iterator[profile]:
    """torch's profiler; it announces its start and end on standard error, which nobody asked for."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = profile(activities=activities, profile_memory=True, record_shapes=False)
    with _no_standard_error():
        profiler.start()
    try:
        yield profiler
    finally:
        with _no_standard_error():
            profiler.stop()


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Python and C++ alike write to file 2: for a moment it leads nowhere."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _read(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"])


def _held(program: Program, batch: Batch) -> MemoryParts:
    """Bytes held before the step."""
    parameters = [*program.module.parameters(), *program.module.buffers()]
    gradients = [parameter.grad for parameter in program.module.parameters() if parameter.grad is not None]
    state = list(state_tensors(program.optimizer))
    return MemoryParts(
        parameters=_bytes(parameters),
        gradients=max(_bytes(gradients), _bucket_bytes(program.spread_module)),
        optimizer_state=_bytes(state),
        inputs=sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch)),
    )


def _bucket_bytes(module: nn.Module) -> int:
    """Replicas keep their gradient buckets from step to step, also while no gradient points into them."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return 0
    return _bytes(parameter for parameter in module.parameters() if parameter.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's storages, each once, those of the device the first lies on."""
    sizes = {}
    for tensor in tensors:
        storage = _storage(local(tensor))
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


class _Witness:
    """Notes, during the step, at which addresses gathered parameters and finished gradients lie."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.gathered: set[int] = set()
        self.gradients: set[int] = set()
        self.handles: list[Any] = []

    def __enter__(self) -> _Witness:
        for module in self.program.module.modules():
            self.handles.append(module.register_forward_pre_hook(self.see_parameters))
        self.handles.append(self.program.optimizer.register_step_pre_hook(self.see_gradients))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def see_parameters(self, module: nn.Module, arguments: Any) -> None:
        for parameter in module.parameters():  # those of its parts too: inside a compiled block no hook runs
            self.gathered.add(_storage(local(parameter)).data_ptr())

    def see_gradients(self, *_: Any) -> None:
        for parameter in self.program.module.parameters():
            if parameter.grad is not None:
                self.gradients.add(_storage(local(parameter.grad)).data_ptr())


def _allocations(events: list[dict[str, Any]], device: torch.device) -> list[Allocation]:
    """Pair births with deaths by address; a release without a birth belongs to what was held before."""
    wanted = 1 if device.type == "cuda" else 0
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == wanted]
    changes.sort(key=lambda event: event["args"].get("Ev Idx", 0))
    changes.sort(key=lambda event: event["ts"])
    end = max((event["ts"] for event in changes), default=0.0) + 1
    open_ones: dict[int, tuple[int, float]] = {}
    found = []
    for event in changes:
        address, num_bytes, at = event["args"]["Addr"], event["args"]["Bytes"], event["ts"]
        if num_bytes > 0:
            open_ones[address] = (num_bytes, at)
        elif address in open_ones:
            size, born = open_ones.pop(address)
            found.append(Allocation(address, size, born, at))
    found += [Allocation(address, size, born, end) for address, (size, born) in open_ones.items()]
    return found


def _regions(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (event["ts"], event["ts"] + event["dur"]) for event in events if event.get("name") == name and "dur" in event
    ]


def _peak_parts(
    allocations: list[Allocation], held: MemoryParts, witness: _Witness, forwards: list[tuple[float, float]]
) -> MemoryParts:
    """What was in use at the moment of the peak, by category."""
    peak_at = _peak_moment(allocations)
    sums = {"gradients": 0, "gathered_parameters": 0, "activations": 0, "temporaries": 0}
    for allocation in allocations:
        if allocation.born <= peak_at < allocation.died:
            sums[_category(allocation, witness, forwards)] += allocation.num_bytes
    return MemoryParts(
        parameters=held.parameters,
        optimizer_state=held.optimizer_state,
        inputs=held.inputs,
        gradients=held.gradients + sums["gradients"],
        gathered_parameters=sums["gathered_parameters"],
        activations=sums["activations"],
        temporaries=sums["temporaries"],
    )


def _peak_moment(allocations: list[Allocation]) -> float:
    changes = [(a.born, a.num_bytes) for a in allocations] + [(a.died, -a.num_bytes) for a in allocations]
    live = most = 0
    moment = 0.0
    for at, change in sorted(changes):
        live += change
        if live > most:
            most, moment = live, at
    return moment


def _category(allocation: Allocation, witness: _Witness, forwards: list[tuple[float, float]]) -> str:
    if allocation.address in witness.gathered:
        return "gathered_parameters"
    if allocation.address in witness.gradients:
        return "gradients"
    inside = any(start <= allocation.born <= end < allocation.died for start, end in forwards)
    return "activations" if inside else "temporaries"


class _CollectiveWatch(TorchDispatchMode):
    """Sees every c10d call with its tensors. All run along dp: no other axis is in use yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Collective] = []
        self.supports_higher_order_operators = True  # compiled blocks call some; they pass through

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled while this watches; else torch would run it as if it were not."""
        return True

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = str(op.overloadpacket).rpartition(".")[2] if op.namespace == "c10d" else ""
        if name in COLLECTIVE_CALLS:
            kind, position = COLLECTIVE_CALLS[name]
            tensors = [item for item in tree_leaves(arguments[position]) if isinstance(item, Tensor)]
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.found.append(Collective(kind=kind, axis="dp", count=1, total_bytes=num_bytes))
        return op(*arguments, **(options or {}))
