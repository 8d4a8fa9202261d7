"""Deferred initialisation: a module is built without memory, and each rank makes only what it holds.

    with deferred():
        module = GPT(options)          any constructor: tensors have shape, dtype and device, but nothing in them

Under `deferred` every op that makes or changes a tensor is written on a tape (runtime/tape.py) in place of its
result. An op that draws random numbers is also run once, into memory that is dropped at once, so that the generator
goes on as it would; its state before is on the tape. Of a module that is only followed for a plan nothing is drawn. A
value that the constructor reads (`.item()`) is computed there and then.

`apply` takes such a module. What it does to parameters first, casts and cuts over tp or ep, goes onto the tape as well; then
`materialise` plays the ops that each remaining tensor comes of, one tensor at a time, and drops the rest. Stages of other
ranks are never made; under ZeRO a block is sharded before the next one is made. The result equals, bit for bit, what the
constructor alone would have made with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.models.seeded import weights_matter
from meshwright.runtime._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    forget_conversions,
)
from meshwright.runtime.rebuild import Drawn, map_leaves, tensors_in
from meshwright.runtime.tape import Tape

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module in which torch keeps its parts."""


@contextmanager
def deferred() -> Iterator[None]:
    """Modules built inside hold no memory until `apply` gives them to ranks."""
    with _Copies(), _Deferral():
        yield


def building(plan: Plan) -> AbstractContextManager[None]:
    """What to build a module in: deferred where the plan divides it, or has it live on the host."""
    return deferred() if divides(plan) else nullcontext()


def divides(plan: Plan) -> bool:
    """Whether a rank holds a part of the model's parameters, or holds them elsewhere."""
    mesh = plan.mesh
    return plan.zero > 0 or plan.offload.what == "parameters" or mesh.tp * mesh.pp * mesh.ep > 1


def check_can_be_divided(module: nn.Module) -> None:
    """The weights of a scripted module cannot be replaced by what a rank holds, and its code cannot be followed under cp."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
            raise PlanError(
                f"part '{name}' is a scripted module (torch.jit.script), whose weights and tokens cannot be divided: give the "
                "model unscripted, or use dp with zero 0"
            )


class _Deferral(FakeTensorMode):
    """Every tensor made under it knows it, and so its tape."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tape = Tape()
        self.within = False
        """Whether an op is being followed: what it is made of is not of interest."""
        self.made: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers that were made: several modules may share one."""

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if self.within:
            return super().__torch_dispatch__(op, types, arguments, options)
        if _reads(op):
            return op(*self._real(arguments), **self._real(options))
        drawn = Drawn.before(op, arguments, options) if weights_matter() else None
        if drawn is not None:
            op(*self._real(arguments), **self._real(options))  # the generator goes on as if this had been kept
        described = self.tape.describe(op, arguments, options, drawn)
        self.within = True
        try:
            result = super().__torch_dispatch__(op, types, arguments, options)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return op(*self._real(arguments), **self._real(options))
        finally:
            self.within = False
        self.tape.add(described, arguments, options, result)
        _forget_values(result)
        forget_conversions(self)
        return result

    def _real(self, nest: Any) -> Any:
        """The same arguments with memory and values."""
        return map_leaves(lambda leaf: self.real(leaf) if isinstance(leaf, FakeTensor) else leaf, nest)

    def real(self, tensor: Tensor) -> Tensor:
        return self.tape.value(tensor)


class _Copies(TorchFunctionMode):
    """`copy.deepcopy` of a deferred tensor: torch's own would copy the memory it does not have."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is not Tensor.__deepcopy__ or not is_deferred(arguments[0]):
            return function(*arguments, **(options or {}))
        tensor, memo = arguments
        if id(tensor) not in memo:
            copy = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
        return memo[id(tensor)]


def _forget_values(result: Any) -> None:
    """A fake mode follows the values of small tensors beside the tape, which knows them already."""
    for tensor in tensors_in(result):
        if isinstance(tensor, FakeTensor):
            tensor.constant = None


def _reads(op: Any) -> bool:
    """Whether an op returns a number to Python."""
    return str(op.overloadpacket) in ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero")


def is_deferred(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, _Deferral)


@torch.no_grad()
def materialise(module: nn.Module) -> None:
    """Give every deferred tensor of a module its memory and value. Tied parameters stay tied, shared buffers shared."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in _deferred(part._parameters):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_mode_of(parameter).real(parameter), parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]
        materialise_buffers(part)


@torch.no_grad()
def materialise_outside(module: nn.Module, blocks: tuple[str, ...]) -> None:
    """The buffers that are in no block: what a model makes of them and of the batch alone is followed on values."""
    for path, part in module.named_modules():
        if not any(path == name or path.startswith(f"{name}.") for name in blocks):
            materialise_buffers(part)


def value_of(tensor: Tensor) -> Tensor:
    """What a deferred tensor would hold."""
    return _mode_of(tensor).real(tensor)


def materialise_buffers(part: nn.Module) -> None:
    for name, buffer in _deferred(part._buffers):
        part._buffers[name] = _shared(buffer)
    for name, tensor in _deferred(vars(part)):
        setattr(part, name, _shared(tensor))


def materialise_hidden(module: nn.Module) -> None:
    """Give memory to modules that torch does not know as parts, such as a frozen teacher in a plain list: nothing divides them, and
    every rank has them whole."""
    registered = {id(part) for part in module.modules()}
    for part in list(module.modules()):
        for name, value in vars(part).items():
            for hidden in _modules_in(value) if name not in REGISTERED else ():
                if id(hidden) not in registered:
                    materialise(hidden)


def _modules_in(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(item)


def _deferred(named: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in named.items() if is_deferred(tensor)]


def _mode_of(tensor: Any) -> _Deferral:
    mode = tensor.fake_mode
    assert isinstance(mode, _Deferral)
    return mode


def _shared(tensor: Tensor) -> Tensor:
    mode = _mode_of(tensor)
    if id(tensor) not in mode.made:
        mode.made[id(tensor)] = (tensor, mode.real(tensor))
    return mode.made[id(tensor)][1]


def deferred_tensors(module: nn.Module) -> Iterable[Tensor]:
    """What of a module has no memory yet."""
    return (tensor for tensor in (*module.parameters(), *module.buffers()) if is_deferred(tensor))
