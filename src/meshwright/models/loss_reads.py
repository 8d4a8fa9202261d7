"""What a loss function reads beside its arguments: modules and trained tensors that its code refers to.

A loss is given (output, batch). One that reads a module by a variable of its own reads another object than the one that is
trained: a model is built anew for every run, cut and shared out. What it computes from weights would then be constant, and a
module with weights of its own (a critic, class centres) would never be trained. Both are refused. A frozen module, such as the
network of a perceptual loss, is read as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from meshwright.core.errors import ModelError

DEEPEST = 4
"""Functions that call functions, objects that hold objects."""


def read_by(loss: Any) -> dict[str, Any]:
    """Modules and tensors, by the words for where they are."""
    found: dict[str, Any] = {}
    _look(loss, "itself", DEEPEST, found, set())
    return found


def check_loss_reads_nothing_trained(name: str, loss: Callable[..., Any] | None) -> None:
    """name: of the model's source."""
    for where, held in read_by(loss).items() if loss is not None else ():
        if not _is_trained(held):
            continue
        what = f"the loss is a {type(held).__name__}" if where == "itself" else f"the loss reads '{where}'"
        raise ModelError(
            f"{name}: {what}, which has weights to be trained and is no part of the module that is: its gradients would be lost. "
            "Compute this term in the module's forward and return it beside its output, so that the loss only adds it; or freeze "
            "it with requires_grad_(False) if it is not to be trained"
        )


def _is_trained(held: Any) -> bool:
    tensors = held.parameters() if isinstance(held, nn.Module) else [held]
    return any(tensor.requires_grad for tensor in tensors)


def _look(value: Any, where: str, depth: int, found: dict[str, Any], seen: set[int]) -> None:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | Tensor):
        found[where] = value
        return
    for name, inner in _inside(value):
        _look(inner, name if where == "itself" else f"{where}.{name}", depth - 1, found, seen)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        yield from _variables(value)
    elif isinstance(value, MethodType):
        yield from (("self", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from ((str(at), one) for at, one in enumerate((value.func, *value.args)))
        yield from value.keywords.items()
    elif isinstance(value, dict):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(at), one) for at, one in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).items()


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Of a function: those of the function around it, its defaults, and those of its file that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from ((f"default {at}", one) for at, one in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    for name in function.__code__.co_names:
        held = function.__globals__.get(name)
        if isinstance(held, nn.Module | Tensor | FunctionType | partial) and not _is_of_torch(held):
            yield name, held


def _is_of_torch(held: Any) -> bool:
    return str(getattr(held, "__module__", "")).startswith("torch.") and not isinstance(held, nn.Module | Tensor)
