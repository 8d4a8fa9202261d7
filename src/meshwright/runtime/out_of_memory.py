"""Out of memory, explained: what was in use by category when it happened, and which tensors are the largest.

A device that is full raises an error here, and its allocator says how much was in use. On a CPU the host is the device: what an
allocation did not get is raised too; but a host that is overcommitted kills the process instead, and whoever started it says so
(`runtime/launch.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from meshwright.core.errors import OutOfMemoryError
from meshwright.core.units import format_bytes
from meshwright.models.objective import Batch
from meshwright.runtime.clip import local
from meshwright.runtime.environment import device_bytes
from meshwright.runtime.held import held_bytes

if TYPE_CHECKING:
    from meshwright.runtime.program import Program

CPU_WORDS = ("can't allocate memory", "not enough memory")
SHOWN_TENSORS = 5
PASSING = ("activations", "gathered_parameters", "communication_buffers", "temporaries")
"""Categories that are empty between steps."""


@contextmanager
def memory_explained(program: Program, batch: Batch) -> Iterator[None]:
    """An allocation that fails inside becomes an error that says what filled the memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(explain(program, batch, error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_WORDS)


def explain(program: Program, batch: Batch, error: BaseException) -> str:
    """One paragraph, and a line a category and a tensor."""
    device = program.device
    place = f"device {device}" if device.type == "cuda" else "the host, which is the device here,"
    held = {name: size for name, size in msgspec.structs.asdict(held_bytes(program, batch)).items() if size}
    in_use = device_bytes(device)
    rest = in_use - sum(held.values())
    what = "activations, gathered parameters, buffers and temporaries"
    if device.type != "cuda":
        what += ", and the process itself"
    where = where_it_happened(program, error)
    lines = [f"{place} is out of memory{f' in {where}' if where else ''}: {_first_line(error)}"]
    lines.append(f"in use then: {format_bytes(in_use)}")
    lines += [f"  {name.replace('_', ' ')}: {format_bytes(size)}" for name, size in held.items()]
    lines.append(f"  {what}: {format_bytes(max(0, rest))}")
    lines += _as_sampled(program)
    lines.append("largest tensors that stay between steps:")
    lines += [f"  {name}: {format_bytes(size)}" for name, size in largest_tensors(program)]
    return "\n".join(lines)


def where_it_happened(program: Program, error: BaseException) -> str:
    """The innermost module that was running; none in a backward that redoes no forward."""
    names = {id(module): name for name, module in program.module.named_modules() if name}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _as_sampled(program: Program) -> Iterator[str]:
    """What comes and goes in a step, as the last sampled one had it at its peak: when memory is full there is none left to ask."""
    if program.watch.sample is None:
        return
    sizes = msgspec.structs.asdict(program.watch.sample.memory_bytes)
    passing = [f"{name.replace('_', ' ')} {format_bytes(sizes[name])}" for name in PASSING if sizes[name]]
    if passing:
        yield f"  of these, at the peak of the last sampled step: {', '.join(passing)}"


def largest_tensors(program: Program) -> list[tuple[str, int]]:
    """Parameters, gradients and optimizer state by the parameter's name, as this rank holds them."""
    sizes: dict[str, int] = {}
    for name, parameter in program.module.named_parameters():
        sizes[f"parameter {name}"] = _size(parameter)
        if parameter.grad is not None:
            sizes[f"gradient of {name}"] = _size(parameter.grad)
        state = [one for one in program.optimizer.state.get(parameter, {}).values() if isinstance(one, Tensor)]
        if state:
            sizes[f"optimizer state of {name}"] = sum(_size(one) for one in state)
    return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_TENSORS]


def _size(tensor: Tensor) -> int:
    own = local(tensor)
    return own.numel() * own.element_size()


def _first_line(error: BaseException) -> str:
    """Without the allocator's advice about its own settings."""
    return (str(error).splitlines() or ["no more was to be had"])[0].split(" Of the allocated memory")[0]
