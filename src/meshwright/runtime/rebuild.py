"""Ops that were run once and can be run again: from their arguments, in the same order, with the same random numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import ModelError
from meshwright.runtime._torch import alias_of
from meshwright.runtime.watch import Watch

Maker = tuple[int, int]
"""Number of an op, and which of its results."""


@dataclass(eq=False)
class Part:
    """A tensor: itself, or, once it is forgotten, which result it lies in and how."""

    tensor: Tensor | None
    maker: Maker | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int
    core: Core | None = None
    """Who makes it again."""

    @classmethod
    def of(cls, tensor: Tensor, maker: Maker | None) -> Part:
        part = cls.place(tensor, maker)
        part.tensor = alias_of(tensor)
        return part

    @classmethod
    def place(cls, tensor: Tensor, maker: Maker | None) -> Part:
        """Forgotten from the start."""
        offset = int(tensor.storage_offset())
        return cls(None, maker, tensor.dtype, tensor.size(), tensor.stride(), offset, tensor._version)

    def on(self, storage: Tensor) -> Tensor:
        """The same view of a result that was made again."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Drawn:
    """The state of the generator an op drew from: its own, or the device's."""

    device: torch.device
    state: Tensor
    own: torch.Generator | None

    @classmethod
    def before(cls, op: Any, arguments: Any, options: dict[str, Any]) -> Drawn | None:
        if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
            return None
        own = options.get("generator")
        if own is not None:
            return cls(own.device, own.get_state(), own)
        devices = [tensor.device for tensor in tensors_in([*arguments, *options.values()])]
        device = torch.device(options.get("device") or next(iter(devices), "cpu"))
        return cls(device, torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state(), None)

    @contextmanager
    def again(self) -> Iterator[None]:
        if self.own is not None:
            now = self.own.get_state()
            self.own.set_state(self.state)
            yield
            self.own.set_state(now)
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self.state, self.device)
            else:
                torch.set_rng_state(self.state)
            yield


@dataclass
class Call:
    """One op with its arguments, tensors among them as Parts."""

    number: int
    op: Any
    arguments: Any
    options: dict[str, Any]
    drawn: Drawn | None

    @property
    def parts(self) -> list[Part]:
        return [leaf for leaf in leaves_in([self.arguments, *self.options.values()]) if isinstance(leaf, Part)]


@dataclass(eq=False)
class Core:
    """The calls of one run of a block that rebuild what it did not keep."""

    block: str
    watch: Watch
    calls: list[Call] = field(default_factory=list)
    waiting: list[weakref.ref[Part]] = field(default_factory=list)
    """What autograd holds in place of the tensors that are rebuilt."""

    def drop(self, part: Part) -> None:
        part.tensor, part.core = None, self
        self.waiting.append(weakref.ref(part))

    def rebuild(self) -> None:
        """Make everything again that is waited for; each tensor is given back when backward has used it."""
        parts = [part for ref in self.waiting if (part := ref()) is not None]
        kept = {part.maker for part in parts}
        last_read = {part.maker: call.number for call in self.calls for part in call.parts}
        made: dict[Maker | None, Tensor] = {}
        with torch.no_grad(), self.watch.region("recompute"):
            for call in self.calls:
                for place, tensor in enumerate(tensors_in(self._run(call, made))):
                    made.setdefault((call.number, place), tensor)
                over = [m for m in made if m not in kept and last_read.get(m, -1) <= call.number]
                for maker in over:
                    del made[maker]
            for part in parts:
                part.tensor = part.on(made[part.maker])
        self.calls, self.waiting = [], []

    def _run(self, call: Call, made: dict[Maker | None, Tensor]) -> Any:
        def tensor_of(leaf: Any) -> Any:
            if not isinstance(leaf, Part):
                return leaf
            if leaf.tensor is None:
                return leaf.on(made[leaf.maker])
            if leaf.tensor._version != leaf.version:
                raise changed(self.block)
            return leaf.tensor

        context: AbstractContextManager[Any] = call.drawn.again() if call.drawn else nullcontext()
        with context:
            return call.op(*map_leaves(tensor_of, call.arguments), **map_leaves(tensor_of, call.options))


def changed(block: str) -> ModelError:
    return ModelError(
        f"block '{block}' changes in place what its attention core reads: selective recompute cannot make the core again; "
        "use none or full for it"
    )


def map_leaves(change: Callable[[Any], Any], nest: Any) -> Any:
    """Arguments of an op nest lists, tuples and options at most."""
    if isinstance(nest, list | tuple):
        return type(nest)(map_leaves(change, item) for item in nest)
    if isinstance(nest, dict):
        return {name: map_leaves(change, item) for name, item in nest.items()}
    return change(nest)


def leaves_in(nest: Any) -> Iterator[Any]:
    if isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves_in(item)
    else:
        yield nest


def tensors_in(nest: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_in(nest) if isinstance(leaf, Tensor))
