"""Two traces of one module, at two batch sizes → the kinds, blocks and timeline of its Graph.

Every quantity q becomes affine in the number of samples, q(n) = fixed + per_sample · n, with per_sample = q(3) - q(2).
(One sample is not used: batch norm refuses it and matmuls take other paths.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from meshwright.capturing.blocks import block_of_parameter
from meshwright.capturing.groups import CannotSkip
from meshwright.capturing.recording import INPUT, MemoryEntry, Recording, SkipEntry, TracedOp
from meshwright.capturing.stretches import Stretch, find_stretches
from meshwright.core.errors import CaptureError
from meshwright.core.graph import Affine, Block, Kind, MemoryEvent, Op, Pass, Segment, Shape, Source

FEW, MORE = 2, 3

T = TypeVar("T")


def affine(few: float, more: float) -> Affine:
    per_sample = (more - few) / (MORE - FEW)
    return Affine(few - per_sample * FEW, per_sample)


class Assembly:
    """few and more: the traces; blocks: name → whether it is repeated; ties: a parameter's other names."""

    def __init__(
        self, few: Recording, more: Recording, blocks: dict[str, bool], ties: dict[str, list[str]] | None = None
    ) -> None:
        self.few, self.more = few, more
        self.ties = ties or {}
        self.repeated = {"": False, **blocks}
        self.numbers = _numbers(few.ops)
        self.ops: dict[str, list[Op]] = {name: [] for name in self.repeated}
        self.passes: dict[str, list[Pass]] = {name: [] for name in self.repeated}
        self.timeline: list[Segment] = []
        self._place_ops()
        self._place_passes()
        self._check_representatives()

    def kinds(self, classes: dict[str, str]) -> tuple[tuple[Kind, ...], tuple[Block, ...]]:
        """Blocks of the same class with the same ops and passes share a kind, named by the class."""
        names: dict[tuple[str, tuple[Op, ...], tuple[Pass, ...]], str] = {}
        taken: Counter[str] = Counter()
        placed = []
        for name, repeated in self.repeated.items():
            followed = self.few.representatives.get(name, name)
            work = (classes[name], tuple(self.ops[followed]), tuple(self.passes[followed]))
            if work not in names:
                taken[work[0]] += 1
                names[work] = work[0] if taken[work[0]] == 1 else f"{work[0]}#{taken[work[0]]}"
            placed.append(Block(name=name, kind=names[work], repeated=repeated))
        kinds = (Kind(name=kind, ops=ops, passes=passes) for (_, ops, passes), kind in names.items())
        return tuple(kinds), tuple(placed)

    def gradient_order(self) -> tuple[str, ...]:
        """With the parameters of skipped blocks, in the order of their representative's."""
        ready = [entry for entry in self.few.gradient_order if isinstance(entry, str)]
        found: list[str] = []
        for entry in self.few.gradient_order:
            if isinstance(entry, SkipEntry):
                stem = f"{self.few.representatives[entry.block]}."
                found.extend(f"{entry.block}.{name.removeprefix(stem)}" for name in ready if name.startswith(stem))
            else:
                found.append(entry)
        return tuple(found)

    def _place_ops(self) -> None:
        for one, other in _pair(self.few.ops, self.more.ops, "ops"):
            if (one.name, one.phase, one.block) != (other.name, other.phase, other.block):
                raise depends_on_batch(f"op {one.name} in block '{one.block}' became {other.name}")
            self.ops[one.block].append(self._op(one, other))

    def _place_passes(self) -> None:
        for one, other in _pair(find_stretches(self.few), find_stretches(self.more), "stretches of memory"):
            if one.skipped:
                number = 0 if one.phase == "forward" else 1
            else:
                number = len(self.passes[one.block])
                self.passes[one.block].append(self._pass(one, other))
            self.timeline.append(Segment(one.block, number))

    def _check_representatives(self) -> None:
        """A skipped block is placed as one forward and at most one backward."""
        for name in set(self.few.representatives.values()):
            phases = [step.phase for step in self.passes[name]]
            if phases not in (["forward"], ["forward", "backward"]):
                raise CannotSkip

    def _op(self, one: TracedOp, other: TracedOp) -> Op:
        return Op(
            name=one.name,
            kind=one.kind,
            phase=one.phase,
            dtype=one.dtype,
            module=one.module,
            region=one.region,
            causal=one.causal,
            inputs=tuple(self._source(source, one.block) for source in one.inputs),
            input_shapes=_input_shapes(one, other),
            result_shape=_shape(one.result_shape, other.result_shape),
            flops=affine(one.flops, other.flops),
            read_bytes=affine(one.read_bytes, other.read_bytes),
            written_bytes=affine(one.written_bytes, other.written_bytes),
            saved_bytes=affine(one.saved_bytes, other.saved_bytes),
        )

    def _pass(self, one: Stretch, other: Stretch) -> Pass:
        numbers = [self.numbers[number] for number in one.ops]
        events = (self._event(*pair, one.block) for pair in _pair(one.memory, other.memory, "memory events"))
        return Pass(
            phase=one.phase,
            first_op=numbers[0] if numbers else 0,
            num_ops=len(numbers),
            events=tuple(events),
            output_bytes=affine(one.output_bytes, other.output_bytes),
        )

    def _event(self, one: MemoryEntry, other: MemoryEntry, block: str) -> MemoryEvent:
        maker = self.few.makers.get(one.storage)
        source = INPUT if maker is None else self._source(maker, block)
        return MemoryEvent(source, affine(one.num_bytes, other.num_bytes))

    def _source(self, source: Source, block: str) -> Source:
        """As seen from inside a block."""
        if isinstance(source, str):
            return source if source.startswith("@") else self._parameter(source, block)
        home = self.few.ops[source].block
        if home == block:
            return self.numbers[source]
        if self.repeated[home] or self.repeated[block]:
            return INPUT
        return f"@{home}#{self.numbers[source]}"

    def _parameter(self, name: str, block: str) -> str:
        """By the name it has in the block; of tied ones, that may be another than the first."""
        names = (name, *self.ties.get(name, ()))
        own: str | None = next((each for each in names if block_of_parameter(each, self.repeated) == block), None)
        if own is None:
            return f"@parameter:{name}"
        return own.removeprefix(f"{block}.") if block else own


def _numbers(ops: list[TracedOp]) -> list[int]:
    """The number of each op inside its block."""
    counts: Counter[str] = Counter()
    numbers = []
    for op in ops:
        numbers.append(counts[op.block])
        counts[op.block] += 1
    return numbers


def _input_shapes(one: TracedOp, other: TracedOp) -> tuple[Shape, ...]:
    """Of an op that joins one tensor from each sample, those of the smaller batch: each is alike, and bytes count them all."""
    few, more = one.input_shapes, other.input_shapes
    if len(few) < len(more) and more[: len(few)] == few and more.count(more[-1]) > len(more) - len(few):
        return tuple(_shape(shape, shape) for shape in few)
    return tuple(_shape(*shapes) for shapes in _pair(few, more, f"inputs of {one.name}"))


def _shape(few: tuple[int, ...], more: tuple[int, ...]) -> Shape:
    return tuple(affine(*sizes) for sizes in _pair(few, more, "dims of a tensor"))


def _pair(few: Sequence[T], more: Sequence[T], what: str) -> Iterable[tuple[T, T]]:
    if len(few) != len(more):
        raise depends_on_batch(f"{len(few)} {what} with {FEW} samples, {len(more)} with {MORE}")
    return zip(few, more, strict=True)


def depends_on_batch(said: str) -> CaptureError:
    return CaptureError(
        f"the module does other work for other batch sizes ({said}): its cost cannot be scaled; "
        "remove the dependence on the batch size, or write the plan by hand"
    )
