"""Side effects of a block that backward runs again: the second run begins where the first one began, and leaves nothing.

    attributes, items of lists, dicts and sets     put back as they were, and afterwards as they are
    buffers and parameters that it writes          for the second run, copies from before the first take their place

Which tensors a block writes is learned in its first call, for which all are copied; later calls copy those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ModelError
from meshwright.models.snapshot import Snapshot
from meshwright.runtime._torch import DisableTorchFunction
from meshwright.runtime.clip import local
from meshwright.runtime.gathered import own_shard

Copies = dict[tuple[nn.Module, str], Tensor]
"""Where a tensor is registered → its value before the call."""


class SideEffects:
    """Of one block."""

    def __init__(self, block: nn.Module, name: str, writes_parameters: bool = True) -> None:
        """writes_parameters: whether parameters may be among what it writes; where not, none is copied."""
        self.block, self.name, self.writes_parameters = block, name, writes_parameters
        self.parts: list[nn.Module] | None = None
        """Those that change when the block is called; None before its first call."""
        self.written: list[tuple[nn.Module, str]] = []

    def begin(self, arguments: Any) -> Call:
        return Call(self, arguments)

    def places(self) -> list[tuple[nn.Module, str]]:
        """Where the tensors are that may be written."""
        if self.parts is not None:
            return self.written
        return [
            (part, name)
            for part in self.block.modules()
            for name in (*(part._parameters if self.writes_parameters else ()), *part._buffers)
        ]


class Call:
    """One call of a block: what it began with, until backward has run it again."""

    def __init__(self, effects: SideEffects, arguments: Any) -> None:
        self.effects = effects
        parts = effects.block.modules() if effects.parts is None else effects.parts
        self.before = Snapshot(parts, arguments=arguments)
        self.copies: Copies = {}
        for place in effects.places():
            tensor = registered(place)
            if tensor is not None:
                self.copies[place] = tensor.detach().clone()
        self.versions = [(part, name, b._version) for part, name, b in _buffers(effects.block)]

    def end(self) -> None:
        """After the first run."""
        effects = self.effects
        if effects.parts is None:
            effects.parts = self.before.changed_parts()
            effects.written = [place for place, copy in self.copies.items() if _differs(registered(place), copy)]
            self.copies = {place: self.copies[place] for place in effects.written}
            self._check_shards()
        else:
            self._check()

    def _check_shards(self) -> None:
        for (part, name), copy in self.copies.items():
            if isinstance(copy, DTensor):
                raise ModelError(
                    f"parameter '{self._name(part, name)}' is written in forward, where ZeRO gathers it within a recomputed block: "
                    "its value from before would not be there for recompute; make it a buffer, or set recompute to none for it"
                )

    def _name(self, part: nn.Module, name: str) -> str:
        names = {id(inner): path for path, inner in self.effects.block.named_modules()}
        return ".".join(filter(None, (self.effects.name, names[id(part)], name)))

    def _check(self) -> None:
        for part, name, version in self.versions:
            buffer = part._buffers.get(name)
            if buffer is not None and buffer._version != version and (part, name) not in self.copies:
                raise ModelError(
                    f"buffer '{self._name(part, name)}' is written in this forward "
                    "and was not in the first one: its value from before is not there for recompute; write it in every forward, or "
                    "set recompute to none for this block"
                )

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """For the second run."""
        now = Snapshot(self.before.parts, arguments=[held for held, _ in self.before.items.values()])
        originals = {place: registered(place) for place in self.copies}
        self.before.restore()
        for place, copy in self.copies.items():
            original, made = originals[place], copy.clone()
            _register(place, nn.Parameter(made, original.requires_grad) if isinstance(original, nn.Parameter) else made)
        try:
            yield
        finally:
            now.restore()
            for place, tensor in originals.items():
                _register(place, tensor)


def registered(place: tuple[nn.Module, str]) -> Tensor | None:
    part, name = place
    return part._parameters[name] if name in part._parameters else part._buffers.get(name)


def _register(place: tuple[nn.Module, str], tensor: Any) -> None:
    part, name = place
    (part._parameters if name in part._parameters else part._buffers)[name] = tensor


def _buffers(block: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for part in block.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part, name, buffer


def _differs(tensor: Tensor | None, copy: Tensor) -> bool:
    """Of what this rank holds: a parameter that lies in shards when a block begins may be gathered when it ends."""
    if tensor is None:
        return True
    with DisableTorchFunction():
        before, now = _alike(copy.detach(), tensor.detach())
        return (before.shape, before.dtype) != (now.shape, now.dtype) or not torch.equal(before, now)


def _alike(before: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """A shard with the same rows of what was gathered, which is in the dtype of the forward."""
    if isinstance(before, DTensor) and not isinstance(now, DTensor):
        return before.to_local().to(now.dtype), own_shard(now, before)
    if isinstance(now, DTensor) and not isinstance(before, DTensor):
        return own_shard(before, now), now.to_local().to(before.dtype)
    return local(before), local(now)
