"""What a user's code does to a module while its parameters are gathered, beyond computing a result.

    writes a parameter (a teacher that follows its student)     written back to the shard, before it is forgotten
    leaves a tensor on an attribute or in a list (`aux_loss`)   its backward gathers the parameters again, if it comes first
    adds to a list or dict it is called with                    `fully_shard` calls it with copies: what was added is carried back
    calls some blocks, and others on other ranks                see runtime/passed_over.py

A parameter counts as written where its version or its memory is another, where it is frozen (no other way leads to a new value),
and in the first forward where its bits are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ModelError
from meshwright.models.follow import carry_back
from meshwright.models.snapshot import Snapshot
from meshwright.runtime._torch import DisableTorchFunction, drop_gather_ahead, tree_leaves
from meshwright.runtime.messages.exchange import all_ranks
from meshwright.runtime.passed_over import PassedOver
from meshwright.runtime.read_outside import ReadOutside
from meshwright.runtime.replicas import checksum
from meshwright.runtime.usage import Usage

Place = tuple[nn.Module, str]


class Mark(NamedTuple):
    """A gathered parameter as it was."""

    memory: Tensor
    version: int
    bits: int | None

    @staticmethod
    def of(parameter: Tensor, is_first: bool) -> Mark:
        return Mark(parameter.data, parameter._version, int(checksum(parameter)) if is_first else None)

    def is_written(self, parameter: Tensor) -> bool:
        if not parameter.requires_grad or self.version != parameter._version or self._is_moved(parameter):
            return True
        return self.bits is not None and self.bits != int(checksum(parameter))

    def _is_moved(self, parameter: Tensor) -> bool:
        return self.memory.data_ptr() != parameter.data_ptr()

    def put_in_place(self, parameter: Tensor) -> None:
        """What was set anew (`parameter.data = …`) lies where `fully_shard` looks for it."""
        if self._is_moved(parameter):
            self.memory.copy_(parameter.data)
            parameter.data = self.memory


class Gathered:
    """Of a module whose state is sharded, and the modules in it that are gathered by themselves."""

    def __init__(
        self, root: nn.Module, gives_up: bool, usage: Usage | None = None, passed_over: PassedOver | None = None
    ) -> None:
        """gives_up: whether inner modules forget gathered parameters after their forward (ZeRO 3). usage: is shown them."""
        self.root, self.gives_up, self.usage, self.passed_over = root, gives_up, usage, passed_over
        self.names = {
            (part, leaf): f"{path}.{leaf}" for path, part in root.named_modules() for leaf in part._parameters
        }
        self.shards: dict[Place, DTensor] = {}
        for part, leaf in self.names:
            parameter: Any = part._parameters[leaf]
            if isinstance(parameter, DTensor):
                self.shards[part, leaf] = parameter
        self.marks: dict[Place, Mark] = {}
        self.written: dict[str, int] = {}
        """In the first forward: the bits of what was written."""
        self.is_first, self.is_inside = True, False
        """Whether this is the first forward of the root, and whether it is running."""
        self.leaving: dict[nn.Module, bool] = {}
        """Whether a module leaves tensors behind; learned in its first forward."""
        for part in root.modules():
            if isinstance(part, FSDPModule):
                self._watch(part)

    def _watch(self, part: nn.Module) -> None:
        called: list[Any] = []

        def before(_: nn.Module, arguments: Any, options: Any) -> Any:
            called.append((arguments, options))
            return None if self.passed_over is None else self.passed_over.before(part, (arguments, options))

        part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        part.forward = self._around(part, part.forward, called)

    def _around(self, part: nn.Module, forward: Callable[..., Any], called: list[Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*arguments: Any, **options: Any) -> Any:
            given = called.pop() if called else None
            if part is self.root:
                self._drop_ahead()
                if self.passed_over is not None:
                    self.passed_over.begin()
            looks = self.gives_up and part is not self.root and self.leaving.get(part, True) and torch.is_grad_enabled()
            before = Snapshot(part.modules(), arguments=(arguments, options)) if looks else None
            with DisableTorchFunction():  # of a parameter that tp cuts, what this rank holds is marked and written back
                for place, parameter in self._gathered(part):
                    self.marks[place] = Mark.of(parameter, self.is_first)
                    if self.usage is not None and parameter.requires_grad:
                        self.usage.watch(self.shards[place], parameter)
            watches = part is self.root and self.is_first
            self.is_inside = self.is_inside or watches
            with ReadOutside(self._names_of_shards()) if watches else nullcontext():
                result = forward(*arguments, **options)
            if watches:
                self.is_inside = False
            if self.is_first and part is not self.root:
                self._refuse_second_derivatives(part, result)
            if part is self.root and self.passed_over is not None:
                result = self.passed_over.end(result)
            with DisableTorchFunction():
                if part is self.root or self.gives_up:
                    self._write_back(part)
                if before is not None:
                    self._gather_again(part, before)
            if given is not None:
                carry_back(given, (arguments, options))
            return result

        return run

    def _refuse_second_derivatives(self, part: nn.Module, result: Any) -> None:
        """A backward of which a gradient will be taken (`create_graph=True`), inside the forward: it lets go of parameters that the
        gradient of it asks for."""
        name = next(name for name, one in self.root.named_modules() if one is part)

        def see(_: Tensor) -> None:
            if self.is_inside and torch.is_grad_enabled():
                raise ModelError(
                    f"the forward takes a gradient through block '{name}' with create_graph=True, and ZeRO forgets the block's "
                    "gathered parameters before the gradient of that is computed: use ZeRO 0"
                )

        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(see)

    def _names_of_shards(self) -> dict[int, str]:
        return {id(shard): self.names[place].lstrip(".") for place, shard in self.shards.items()}

    def _drop_ahead(self) -> None:
        for part in self.root.modules():
            if isinstance(part, FSDPModule):
                drop_gather_ahead(part)

    def _gathered(self, part: nn.Module) -> Iterator[tuple[Place, nn.Parameter]]:
        for owner in part.modules():
            for leaf, parameter in owner._parameters.items():
                if (owner, leaf) in self.shards and parameter is not None and not isinstance(parameter, DTensor):
                    yield (owner, leaf), parameter

    @torch.no_grad()
    def _write_back(self, part: nn.Module) -> None:
        for place, parameter in self._gathered(part):
            mark = self.marks.get(place)
            if mark is None or not mark.is_written(parameter):
                continue
            mark.put_in_place(parameter)
            if self.is_first and mark.bits != (bits := int(checksum(parameter))):
                self.written[self.names[place]] = bits
            self._fill(place, parameter)
            self.marks[place] = Mark.of(parameter, self.is_first)
        if part is self.root and self.is_first:
            self.is_first = False
            check_alike(self.written, _group(self.shards))

    def _fill(self, place: Place, parameter: nn.Parameter) -> None:
        shard = self.shards[place]
        local = shard.to_local()
        if local.dtype != parameter.dtype:
            if self.names[place] in self.written:
                raise ModelError(
                    f"parameter '{self.names[place]}' is written in forward, where ZeRO has gathered it in {parameter.dtype}: "
                    "small changes would be lost; use ZeRO 0, or fp32"
                )
            return
        local.copy_(own_shard(parameter, shard))

    def _gather_again(self, part: nn.Module, before: Snapshot) -> None:
        held: list[Any] = list(before.set_attributes().values())
        for container, items in before.filled():
            known = {id(leaf) for leaf in tree_leaves(items)}
            held += [leaf for leaf in tree_leaves(container) if id(leaf) not in known]
        self.leaving[part] = bool(held)
        for leaf in tree_leaves(held):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(_unshard, part))


def own_shard(gathered: Tensor, shard: DTensor) -> Tensor:
    """What a shard holds of a gathered tensor."""
    mesh, num_rows = shard.device_mesh, shard.to_local().shape[0]
    size = -(-gathered.shape[0] // mesh.size(mesh.ndim - 1))
    start = size * mesh.get_local_rank(mesh.ndim - 1) if num_rows else 0
    return gathered.detach().narrow(0, start, num_rows)


def check_alike(written: dict[str, int], group: dist.ProcessGroup | None) -> None:
    """written: parameters that the first forward wrote, and their bits; every rank of the group asks."""
    answers = all_ranks(written, dict[str, int], group) if group is not None and group.size() > 1 else []
    for other in answers:
        odd = next((name for name in {**written, **other} if written.get(name) != other.get(name)), None)
        if odd is not None:
            raise ModelError(
                f"parameter '{odd}' is written in forward, and not alike on all dp ranks: its value depends on each rank's samples "
                "(a first batch that initialises it), and the ranks would train different models; run one forward before the plan "
                "is applied, make it a buffer, or set dp to 1"
            )


def _unshard(part: Any, _: Tensor) -> None:
    part.unshard()


def _group(shards: dict[Place, DTensor]) -> dist.ProcessGroup | None:
    mesh = next((shard.device_mesh for shard in shards.values()), None)
    return None if mesh is None else mesh.get_group(mesh.ndim - 1)
