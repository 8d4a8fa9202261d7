"""A module that a process has in memory, as a small model that other processes can build.

    blocks         of a list of alike ones the first few are kept                                     -> models/shortened.py
    parameters     numbers of the size that layers are begun with; the module's own may be gigabytes, or not there yet   -> _filled
    buffers        as they are: a table of positions or a mask is part of what the model computes

It travels by value (cloudpickle), so that a class of the user's script needs no file to be imported from.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import MeshwrightError, ModelError, RunError
from meshwright.core.files.cache import distrust
from meshwright.models.examples import repeat_samples
from meshwright.models.objective import Batch, Objective, map_batch
from meshwright.models.old_norms import without_computed_weights
from meshwright.models.shortened import shorten
from meshwright.models.source import ModelSource
from meshwright.runtime._torch import tree_leaves

SAMPLES = 4


class CannotCopyError(MeshwrightError):
    """The module in memory cannot be made small, or not be sent."""


@dataclass
class LiveModel:
    module: nn.Module
    """Without memory for its parameters."""
    batch: Batch
    loss: Callable[[Any, Batch], Tensor]
    count: Callable[[Batch], int]

    def source(self) -> ModelSource:
        return ModelSource(
            name=type(self.module).__name__,
            build=lambda: _filled(copy.deepcopy(self.module)),
            example=repeat_samples(self.batch),
            shape=None,
            objective=Objective(loss=self.loss, count=self.count),
        )

    def write(self, path: Path) -> None:
        try:
            import cloudpickle
        except ImportError:
            raise CannotCopyError(
                "the package cloudpickle is not installed, which sends a module to other processes"
            ) from None
        if danger := distrust(path.parent):
            raise CannotCopyError(f"it would be sent through a folder that is not safe, since {danger}: set TMPDIR")
        by_value = [one for one in self._modules_of_code() if not _can_be_imported(one)]
        for one in by_value:
            cloudpickle.register_pickle_by_value(one)
        try:
            path.write_bytes(cloudpickle.dumps(self))
        except Exception as error:
            raise CannotCopyError(
                f"the module cannot be sent to other processes: {type(error).__name__}: {error}"
            ) from error
        finally:
            for one in by_value:
                cloudpickle.unregister_pickle_by_value(one)

    def _modules_of_code(self) -> list[ModuleType]:
        """Files that the model's classes and its loss come from."""
        names = {type(part).__module__ for part in self.module.modules()} | {
            self.loss.__module__,
            self.count.__module__,
        }
        return [sys.modules[name] for name in sorted(names) if name in sys.modules and name != "__main__"]

    @staticmethod
    def read(path: Path) -> LiveModel:
        import pickle

        if danger := distrust(path):  # to read it is to run what is in there
            raise RunError(f"{path} is not read, since {danger}: set TMPDIR to a folder that nobody else can write")
        found: LiveModel = pickle.loads(path.read_bytes())
        return found


def _can_be_imported(module: ModuleType) -> bool:
    """Whether another process finds it by its name: a file that was loaded by its path, it does not."""
    return PathFinder.find_spec(module.__name__.partition(".")[0]) is not None


def skeleton(module: nn.Module) -> nn.Module:
    """A copy without memory for parameters, its repeated blocks cut down to a few."""
    memo: dict[int, Any] = {}
    without_computed_weights(module)
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().cpu().clone() if not buffer.is_meta else buffer
    try:
        found = copy.deepcopy(module, memo)
    except Exception as error:
        raise CannotCopyError(f"the module cannot be copied: {type(error).__name__}: {error}") from error
    if any(buffer.is_meta for buffer in found.buffers()):
        raise CannotCopyError("the module has buffers on the meta device, whose values are not known")
    return shorten(found)


def _filled(module: nn.Module) -> nn.Module:
    """With numbers in the place of parameters without memory; the same at every call with one seed."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_begun(parameter), parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]
    return module


def _begun(parameter: Tensor) -> Tensor:
    drawn = torch.randn(parameter.shape, dtype=torch.float32)
    if parameter.dim() < 2:
        return 0.5 + 0.1 * drawn
    return drawn.mul(float(max(1, parameter[0].numel())) ** -0.5)


def small_batch(batch: Any) -> Batch:
    """A few samples, on the CPU."""
    return map_batch(lambda tensor: tensor[:SAMPLES].detach().cpu().clone(), batch)


class CalledAs(nn.Module):
    """A module called with a dict of tensors as a loop of the user's own calls it: by place, by name, labels too."""

    def __init__(self, inner: nn.Module, num_placed: int) -> None:
        super().__init__()
        self.inner, self.num_placed = inner, num_placed

    def forward(self, **given: Any) -> Any:
        placed = [given.pop(f"{PLACED}{number}") for number in range(self.num_placed)]
        return self.inner(*placed, **{name.removeprefix(NAMED): value for name, value in given.items()})


PLACED, NAMED = "place_", "name_"


def as_batch(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What a forward was called with, for `CalledAs`."""
    placed = {f"{PLACED}{number}": value for number, value in enumerate(arguments)}
    return placed | {f"{NAMED}{name}": value for name, value in options.items()}


def weighted_output(output: Any, batch: Batch) -> Tensor:
    """A loss for a model whose own is not known: every number it returns counts, each with another weight."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    found = [_weighted(leaf) for leaf in leaves if leaf.dim() and leaf.requires_grad]
    if not found:
        raise ModelError("the model returns no tensor that its parameters can be trained by: return its logits")
    return torch.stack(found).sum()


def _weighted(tensor: Tensor) -> Tensor:
    """Mean over samples, so that parts of a batch add up."""
    inner = tensor.shape[1:]
    numbers = torch.arange(max(1, inner.numel()), dtype=tensor.dtype, device=tensor.device)
    return (tensor * torch.cos(numbers).reshape(inner)).double().mean()
