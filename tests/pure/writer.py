"""Writing a kind of block down by hand: ops with edges and shapes; what lives how long follows from who reads it.

A *storage* is one tensor in memory. An op takes the storages it makes, and gives back those that nothing after it reads;
what backward reads of forward is saved. Parameters and their gradients are no storages. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from meshwright.core.graph import Affine, Kind, MemoryEvent, Op, Pass, Phase, Precision, Shape, Source

PER_SAMPLE = "n"
ITEM = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def shape_of(*dims: int | str | tuple[str, int]) -> Shape:
    """`shape_of("n", 4)` is [samples, 4]; `shape_of(("n", 8), 4)` is [8 · samples, 4]."""
    return tuple(_dim(dim) for dim in dims)


def _dim(dim: int | str | tuple[str, int]) -> Affine:
    if isinstance(dim, tuple):
        return Affine(0.0, float(dim[1]))
    return Affine(0.0, 1.0) if dim == PER_SAMPLE else Affine(float(dim), 0.0)


def size_of(shape: Shape, item: float) -> Affine:
    """Bytes; at most one dim grows with the samples."""
    fixed, per_sample = item, 0.0
    for dim in shape:
        per_sample = per_sample * dim.fixed + fixed * dim.per_sample
        fixed *= dim.fixed
    return Affine(fixed, per_sample)


def plus(*sizes: Affine) -> Affine:
    return Affine(sum(size.fixed for size in sizes), sum(size.per_sample for size in sizes))


def minus(size: Affine) -> Affine:
    return Affine(-size.fixed, -size.per_sample)


@dataclass(frozen=True)
class Storage:
    """A tensor in memory: where it comes from, its shape and its bytes."""

    source: Source
    shape: Shape
    size: Affine


class Writer:
    """Collects the ops of one kind; `kind` gives it its passes."""

    def __init__(self, name: str, precision: Precision) -> None:
        self.name, self.precision = name, precision
        self.ops: list[Op] = []
        self.made: list[list[Storage]] = []
        self.last_reader: dict[int, int] = {}
        """id of a storage → the op that reads it last."""
        self.arrived: list[Storage] = []
        self.handed_on: dict[int, bool] = {}
        """id of a storage that outlives the block → whether backward needs it."""

    def outside(self, source: Source, shape: Shape, *, freed: bool, precision: Precision | None = None) -> Storage:
        """A tensor that another block made; freed: whether its last reader here is its last at all."""
        storage = Storage(source, shape, size_of(shape, ITEM[precision or self.precision]))
        if freed:
            self.arrived.append(storage)
        return storage

    def op(
        self,
        phase: Phase,
        name: str,
        kind: str,
        reads: list[Storage | tuple[str, Shape]],
        result: Shape,
        *,
        mask: bool = False,
        gradient: bool = False,
        copies: int = 1,
        precision: Precision | None = None,
        **fields: Any,
    ) -> Storage:
        """One op. `mask`: it also makes a mask of one byte an element, the second storage. `gradient`: of a parameter."""
        number = len(self.ops)
        own = precision or self.precision
        sources = [read.source if isinstance(read, Storage) else read[0] for read in reads]
        shapes = [read.shape if isinstance(read, Storage) else read[1] for read in reads]
        read_sizes = [r.size if isinstance(r, Storage) else size_of(r[1], ITEM[own]) for r in reads]
        one = size_of(result, ITEM[own])
        made = [Storage(number, result, Affine(copies * one.fixed, copies * one.per_sample))]
        if mask:
            made.append(Storage(number, result, size_of(result, 1)))
        for read in reads:
            if isinstance(read, Storage):
                self.last_reader[id(read)] = number
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                phase=phase,
                dtype=own,
                inputs=tuple(sources),
                input_shapes=tuple(fields.pop("input_shapes", shapes)),
                result_shape=result,
                read_bytes=plus(*read_sizes),
                written_bytes=plus(*(storage.size for storage in made)),
                **fields,
            )
        )
        self.made.append([] if gradient else made)
        return made[0]

    def mask_of(self, storage: Storage) -> Storage:
        return self.made[storage.source][1]

    def hand_on(self, storage: Storage, *, saved: bool) -> None:
        self.handed_on[id(storage)] = saved

    def kind(self, *passes: tuple[Phase, int], outputs: tuple[Affine, ...] = ()) -> Kind:
        """Passes as phase and number of ops; `outputs`: what each hands on."""
        found, first = [], 0
        for place, (phase, count) in enumerate(passes):
            output = outputs[place] if place < len(outputs) else Affine(0.0, 0.0)
            events = tuple(event for number in range(first, first + count) for event in self._events(number))
            found.append(Pass(phase=phase, first_op=first, num_ops=count, events=events, output_bytes=output))
            first += count
        assert first == len(self.ops)
        return Kind(name=self.name, ops=tuple(self._saved(n) for n in range(len(self.ops))), passes=tuple(found))

    def _events(self, number: int) -> list[MemoryEvent]:
        events = [MemoryEvent(storage.source, storage.size) for storage in self.made[number]]
        candidates = [*self.arrived, *(storage for made in self.made[: number + 1] for storage in made)]
        for storage in candidates:
            reader = self.last_reader.get(id(storage), storage.source)
            if reader == number and id(storage) not in self.handed_on:
                events.append(MemoryEvent(storage.source, minus(storage.size)))
        return events

    def _saved(self, number: int) -> Op:
        op = self.ops[number]
        if op.phase == "backward":
            return op
        saved = [storage.size for storage in self.made[number] if self._needed_by_backward(storage)]
        return msgspec.structs.replace(op, saved_bytes=plus(*saved))

    def _needed_by_backward(self, storage: Storage) -> bool:
        reader = self.last_reader.get(id(storage))
        read_later = reader is not None and self.ops[reader].phase == "backward"
        return read_later or self.handed_on.get(id(storage), False)
