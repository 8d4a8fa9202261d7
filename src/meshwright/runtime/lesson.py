"""What a block's first run teaches about it: where its attention core lies, what need not be kept, what makes it again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.rules.attention import FUSED_ATTENTION, attention_core, reading_parameters
from meshwright.runtime.rebuild import Maker, changed

MATMULS = ("mm", "bmm", "addmm", "baddbmm")
COPIES = ("clone", "copy_", "_to_copy")
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
PARAMETER, INPUT = "parameter", "@input"


@dataclass(frozen=True)
class Lesson:
    """Ops by number, in the order they ran."""

    ops: tuple[Any, ...]
    dropped: frozenset[int]
    """Whose results are not kept."""
    redone: frozenset[int]
    """Which make these again."""

    def agrees(self, number: int, op: Any) -> bool:
        return number < len(self.ops) and self.ops[number] is op


@dataclass(frozen=True)
class _Step:
    name: str
    kind: str
    module: str
    inputs: tuple[int | str, ...]
    block: str = ""
    phase: str = "forward"


@dataclass
class Notes:
    """What is written down while the first run goes on."""

    block: nn.Module
    ops: list[Any] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    read: list[set[Maker]] = field(default_factory=list)
    """Of each op: results of ops of this run that it reads."""
    writers: dict[Maker, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Of each result: the ops that wrote it."""
    num_bytes: dict[Maker, int] = field(default_factory=dict)
    writes_foreign: set[int] = field(default_factory=set)
    """Ops that change in place what no op of this run made."""
    unknown: set[int] = field(default_factory=set)
    """Ops that cannot be run again: collectives, and what torch does not describe."""

    def __post_init__(self) -> None:
        self.last_writer: dict[int, int | str] = {key_of(p): PARAMETER for p in self.block.parameters()}
        self.names = {id(part): name for name, part in self.block.named_modules()}
        self.running: list[str] = [""]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Know which module of the block runs."""
        parts = [part for part in self.block.modules() if part is not self.block]
        handles = [part.register_forward_pre_hook(self._enter) for part in parts]
        handles += [part.register_forward_hook(self._leave) for part in parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, part: nn.Module, _: Any) -> None:
        self.running.append(self.names[id(part)])

    def _leave(self, part: nn.Module, *_: Any) -> None:
        self.running.pop()

    def note(self, op: Any, arguments: list[Tensor], results: list[Tensor], makers: dict[int, Maker]) -> None:
        """arguments: tensors, before the op ran. makers: of every storage, this op's results among them."""
        number, name = len(self.ops), base_name(op)
        self.ops.append(op)
        self.read.append({makers[key] for tensor in arguments if (key := key_of(tensor)) in makers})
        inputs = tuple(self.last_writer.get(key_of(tensor), INPUT) for tensor in arguments)
        self.steps.append(_Step(name, _kind(name), self.running[-1], inputs))
        if getattr(op, "namespace", "") != "aten" or not all(map(is_plain, arguments)):
            self.unknown.add(number)
        own = {key_of(tensor) for tensor in arguments}
        written = [*results, *(tensor for tensor in written_arguments(op, arguments) if tensor is not None)]
        for tensor in written:
            key = key_of(tensor)
            if key in makers:
                self.writers[makers[key]].add(number)
                self.num_bytes[makers[key]] = tensor.untyped_storage().nbytes()
            elif key in own:
                self.writes_foreign.add(number)
            if name in ALLOCATIONS:
                self.last_writer.pop(key, None)
            else:
                self.last_writer[key] = number


def learn(notes: Notes, handed_on: set[Maker], saved: set[Maker], block: str) -> Lesson:
    """handed_on: results the block returns. saved: results that autograd saved."""
    core = attention_core(notes.steps, reading_parameters(notes.steps) | notes.unknown)
    free = {number for number, step in enumerate(notes.steps) if step.name in ALLOCATIONS}
    read_behind = {maker for number, read in enumerate(notes.read) if number not in core | free for maker in read}
    kept = {number for number, _ in read_behind | handed_on}
    dropped = {
        maker
        for maker in saved
        if maker[0] in core | free
        and maker[0] not in kept
        and notes.writers[maker] <= core | free
        and notes.writers[maker] & core
    }
    redone = _makes(dropped, notes, core | free, kept)
    added = {maker for number in redone for maker in notes.read[number]} - saved - handed_on
    held = sum(notes.num_bytes[maker] for maker in added if maker[0] not in redone)
    if held >= sum(notes.num_bytes[maker] for maker in dropped):
        return Lesson(tuple(notes.ops), frozenset(), frozenset())  # rotary positions before a fused attention
    if redone & notes.writes_foreign:
        raise changed(block)
    return Lesson(tuple(notes.ops), frozenset(number for number, _ in dropped), frozenset(redone))


def _makes(wanted: set[Maker], notes: Notes, able: set[int], kept: set[int]) -> set[int]:
    """The ops that make these results, from what is kept and from outside the core."""
    found: set[int] = set()
    waiting = [number for maker in wanted for number in {maker[0], *notes.writers[maker]}]
    while waiting:
        number = waiting.pop()
        if number in found:
            continue
        found.add(number)
        for maker in notes.read[number]:
            if maker[0] in able and maker[0] not in kept and notes.writers[maker] <= able:
                waiting += {maker[0], *notes.writers[maker]}
    return found


def base_name(op: Any) -> str:
    return str(getattr(op, "overloadpacket", op)).rpartition(".")[2]


def _kind(name: str) -> str:
    if name.startswith(FUSED_ATTENTION):
        return "attention"
    return "matmul" if name in MATMULS else "copy" if name in COPIES else ""


def is_plain(tensor: Tensor) -> bool:
    """Whether storage, size and stride say all about it."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def key_of(tensor: Tensor) -> int:
    """The storage's address in the C++ heap: unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def written_arguments(op: Any, arguments: list[Tensor]) -> list[Tensor]:
    return list(arguments) if is_mutable(op) and getattr(op, "namespace", "") != "aten" else []


def is_mutable(op: Any) -> bool:
    """Collectives write into what they are given, though their schemas do not say so."""
    schema = getattr(op, "_schema", None)
    return schema is None or bool(schema.is_mutable) or getattr(op, "namespace", "") == "c10d"


def makes_nothing(op: Any, arguments: list[Tensor], results: list[Tensor]) -> bool:
    """Whether an op has nothing to do with tensors (a profiler's marks), or only looks at its arguments in another way."""
    own = {key_of(tensor) for tensor in arguments}
    if not results:
        return not own
    return not is_mutable(op) and all(key_of(tensor) in own for tensor in results)
