"""Which weights are split over tp, and how: an integer program over the ops of a graph.

The m_k repeated blocks of a kind k share every decision; every other block is decided alone (sharding/units.py). For weights w,
ways a ∈ {column, row, table, heads}, ops n, tensors t that weights read:

    x[w, a] ∈ {0, 1}   weight w is split in way a; where all are 0, it is whole
    s[n]    ∈ {0, 1}   the result of op n is split (1) or whole (0)
    p[n]    ∈ {0, 1}   the result of op n is a partial sum, which is added up at once, so that it is whole
    u[n]    ∈ {0, 1}   a rank does 1/tp of op n
    g[t]    ∈ {0, 1}   the gradient of t is a partial sum, added up once for all that read t
    F, B ≥ 0           seconds of forward and backward on the device

    minimise   F + B + Σ_k m_k Σ_(n in k) ( call_n s[n] + sum_n p[n] ) + Σ_t m_k read_t g[t] - Σ_w m_k gain_w Σ_a x[w, a]

    F ≥ Σ of the forward kernels, F ≥ their launches (both together where the host runs each op itself); B likewise
    a kernel takes   whole_n + (split_n - whole_n) s[n] + (summed_n - whole_n) (u[n] - s[n])       -> Objective._op_seconds

All seconds come from the cost room (sharding/costs.py), so the program minimises what the search costs. Only x is decided. s, p, u
and g follow from x by rules/labels.py; these constraints repeat its rules:

    Σ_a x[w, a] ≤ 1                                                                                -> _one_way
    result of a weight: s = x[column] + x[heads], p = x[row] + x[table], u = Σ_a x                 -> _apply_weight
    copy of a weight: s = u = Σ_a x                                                                -> _copy_weight
    other ops of forward: s = u = the label of what they read, one of it being split               -> _follow
    backward: s = 1 by row, 0 by column, else one of what it reads being split                     -> _go_back

These constraints make a sharding legal, so that the runtime makes no collective that the objective does not count:

    a weight reads whole tensors, by row split ones                                                -> _apply_weight
    a partial sum has one reader in its block, where the runtime adds it up, or leaves the block   -> _sum_once
    an op that cannot work on parts reads whole tensors; those a gradient flows into lie alike     -> _follow
    what a block hands on to blocks that are decided apart from it is whole                        -> _hand_on_whole
    tied weights are cut along the same dim                                                        -> _tie
    under sequence parallel attention is split: on whole heads it would exchange tokens            -> _split_attention
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter

from meshwright.core.graph import Graph, Op, Source
from meshwright.cost.communication.block_calls import is_whole_lookup
from meshwright.rules.labels import Way, activation_of, is_outer, reads_stream
from meshwright.searching.sharding.integer_program import ONE, Program, Terms, minus, plus
from meshwright.searching.sharding.reads import Reads
from meshwright.searching.sharding.units import Passes, Place, Unit


class ShardProgram:
    """The variables and constraints for the units of one graph."""

    def __init__(self, units: tuple[Unit, ...], graph: Graph, *, sequence_parallel: bool = False) -> None:
        self.units, self.sequence_parallel = units, sequence_parallel
        self.passes = Passes(units, graph)
        self.program = Program()
        self.x = [self._choices(unit) for unit in units]
        self.labels: dict[Place, Terms] = {}
        self.work: dict[Place, Terms] = {}
        self._at = {unit.blocks[0]: number for number, unit in enumerate(units) if not unit.repeated}
        self._reads = [Reads(unit, self._flows) for unit in units]
        self.columns: dict[tuple[int, Source], list[tuple[Op, Terms]]] = {}
        for place in self._in_order():
            self._add(place)
        readers = self._readers()
        self._hand_on_whole(readers)
        self._sum_once(readers)
        self._tie()

    def chosen(self, unit: int, values: list[float]) -> dict[str, Way]:
        """How a solution splits the weights of a unit."""
        return {name: way for (name, way), terms in self.x[unit].items() if sum(values[v] for v in terms) > 0.5}

    # ------------------------------------------------------------ variables

    def _choices(self, unit: Unit) -> dict[tuple[str, Way], Terms]:
        found = {(name, way): self.program.variable(whole=True) for name, ways in unit.ways.items() for way in ways}
        self._one_way(unit, found)
        return found

    def _one_way(self, unit: Unit, found: dict[tuple[str, Way], Terms]) -> None:
        """A weight is whole or split in one way."""
        for name, ways in unit.ways.items():
            if len(ways) > 1:
                self.program.at_least(ONE, plus(*(found[name, way] for way in ways)))

    def way(self, unit: int, name: str | None, *ways: Way) -> Terms:
        """1 where a weight is split in one of these ways, or in any."""
        own = self.x[unit]
        every = ways or ("column", "row", "table", "heads")
        return plus(*(own[name, way] for way in every if name is not None and (name, way) in own))

    def _label(self, unit: int, source: Source) -> Terms:
        """The label s of a tensor that an op reads. What repeated blocks hand on is whole."""
        place = self._place(unit, source)
        return self.labels[place] if place is not None else {}

    def _place(self, unit: int, source: Source) -> Place | None:
        """The op that made a tensor; None where it is no op of these units."""
        if isinstance(source, int):
            return (unit, source)
        block, number, digits = source[1:].rpartition("#")
        if not is_outer(source) or not number or block not in self._at:
            return None
        return (self._at[block], int(digits))

    def _flows(self, source: Source) -> bool:
        """Whether a gradient flows into a tensor from another block: it does into the residual stream, not into the batch."""
        place = self._place(0, source)
        return self._reads[place[0]].is_moving(place[1]) if place is not None else source == "@input"

    def _in_order(self) -> Iterator[Place]:
        """All ops, each after the ops it reads."""
        sorter: TopologicalSorter[Place] = TopologicalSorter()
        for number, unit in enumerate(self.units):
            for place, op in enumerate(unit.kind.ops):
                before = (self._place(number, source) for source in op.inputs)
                sorter.add((number, place), *(found for found in before if found is not None))
        yield from sorter.static_order()

    # ------------------------------------------------------------ constraints

    def _add(self, place: Place) -> None:
        number, op_number = place
        unit = self.units[number]
        op = unit.kind.ops[op_number]
        if op_number in unit.copies:
            self._reads[number].follow(op_number)
            self._copy_weight(place, unit.copies[op_number])
        elif op.phase == "backward":
            self._go_back(place, op)
        else:
            self._reads[number].follow(op_number)
            if op_number in unit.weights:
                self._apply_weight(place, op, unit.weights[op_number])
            else:
                self._follow(place, op)

    def _copy_weight(self, place: Place, name: str) -> None:
        """A copy in another dtype is split as the parameter is."""
        self.labels[place] = self.work[place] = self.way(place[0], name)

    def _apply_weight(self, place: Place, op: Op, name: str) -> None:
        """A row-split weight reads split tensors and makes partial sums. All other weights read whole tensors."""
        number, _ = place
        for source in dict.fromkeys(self.units[number].activations(op)):
            self.program.equal(self._label(number, source), self.way(number, name, "row"))
        self.labels[place] = self.way(number, name, "column", "heads")
        self.work[place] = self.way(number, name)
        column = self.way(number, name, "column")
        if column and reads_stream(op):
            read = activation_of(op, self.units[number].kind, self.units[number].copies)
            self.columns.setdefault((number, read), []).append((op, column))

    def _follow(self, place: Place, op: Op) -> None:
        """An op without a weight: where it can read split tensors, those that a gradient flows into are split alike; else it reads
        whole tensors."""
        number, op_number = place
        read = [self._label(number, source) for source in dict.fromkeys(self.units[number].activations(op))]
        reads = self._reads[number]
        partners = [self._label(number, source) for source in reads.partners(op_number)] if op.result_shape else []
        if not reads.may_split(op_number):
            for label in read:
                self.program.equal(label, {})
            found: Terms = {}
        elif partners:
            found = partners[0]
            for label in partners[1:]:
                self.program.equal(label, found)
            for label in read:
                self.program.at_least(found, label)
        else:
            found = self.program.either(read)
        self.labels[place] = self.work[place] = found
        self._split_attention(place, op)

    def _split_attention(self, place: Place, op: Op) -> None:
        """Under sequence parallel attention must be split."""
        is_core = op.kind == "attention" or (op.kind == "matmul" and op.region == "attention")
        if is_core and self.sequence_parallel:
            self.program.equal(self.labels[place], ONE)

    def _go_back(self, place: Place, op: Op) -> None:
        """Gradients: of what a row-split weight reads they are split, of what a column-split weight reads whole. The gradient of a
        table that is split by rows is split."""
        number, _ = place
        unit = self.units[number]
        name = next((p.own_name for s in op.inputs if (p := unit.parameter_of(s)) and p.own_name in unit.ways), None)
        read = [self._label(number, source) for source in dict.fromkeys(unit.activations(op))]
        made = [self.way(number, name, "row"), *(self.way(number, table, "table") for table in self._tables(unit, op))]
        column = self.way(number, name, "column")
        if column:
            found = self.program.variable()
            for label in [*made, *(minus(label, column) for label in read)]:
                self.program.at_least(found, label)
            self.program.at_least(minus(ONE, column), found)
            self.program.at_least(plus(*made, *read), found)
        else:
            found = self.program.either([*made, *read])
        self.labels[place] = found
        self.work[place] = self.program.either([found, self.way(number, name), *read])

    @staticmethod
    def _tables(unit: Unit, op: Op) -> list[str]:
        """The tables whose gradient an op makes, found by their shape as in rules/labels.py."""
        if op.name != "embedding_dense_backward":
            return []
        found = {
            source
            for other in unit.kind.ops
            if other.phase == "forward" and other.name == "embedding"
            for source, shape in zip(other.inputs, other.input_shapes, strict=False)
            if isinstance(source, str) and source in unit.ways and shape == op.result_shape
        }
        return sorted(found)

    def _hand_on_whole(self, readers: dict[Place | None, list[Place]]) -> None:
        """A result is whole where no op here reads it, since it leaves its block then, or where another pass reads it and repeated
        blocks follow."""
        for place, label in self.labels.items():
            op = self.units[place[0]].kind.ops[place[1]]
            if not label or op.phase != "forward" or not op.result_shape or place[1] in self.units[place[0]].copies:
                continue
            here = self.passes.of(place)
            others = [self.passes.of(reader) for reader in readers.get(place, ())]
            if not others or (self.passes.precedes_repeated(place) and any(other != here for other in others)):
                self.program.equal(label, {})

    def _sum_once(self, readers: dict[Place | None, list[Place]]) -> None:
        """A partial sum is added up once: by its one reader in the block, or where it leaves the block. Under sequence parallel a
        table is split by rows only where the batch is looked up in it."""
        for number, unit in enumerate(self.units):
            for place, name in unit.weights.items():
                own = [reader == number for reader, _ in readers.get((number, place), ())]
                if len(own) > 1 and any(own):
                    self.program.equal(self.way(number, name, "row"), {})
                if self.sequence_parallel and is_whole_lookup(unit.kind.ops[place]):
                    self.program.equal(self.way(number, name, "table"), {})

    def _readers(self) -> dict[Place | None, list[Place]]:
        """Op → the forward ops that read it and pass a gradient back to it, each once."""
        found: dict[Place | None, list[Place]] = {}
        for number, unit in enumerate(self.units):
            for place, op in enumerate(unit.kind.ops):
                if op.phase == "forward" and self._reads[number].is_moving(place):
                    for source in dict.fromkeys(op.inputs):
                        found.setdefault(self._place(number, source), []).append((number, place))
        return found

    def _tie(self) -> None:
        """A tensor with several names is cut once, for all of them."""
        names: dict[str, list[tuple[int, str]]] = {}
        for number, unit in enumerate(self.units):
            for own_name, parameter in unit.parameters.items():
                names.setdefault(parameter.tied_to or parameter.name, []).append((number, own_name))
        for first, *others in names.values():
            for other in others:
                for dim in (0, 1):
                    self.program.equal(self._cut(*first, dim), self._cut(*other, dim))

    def _cut(self, unit: int, name: str, dim: int) -> Terms:
        """1 where the weight is cut along this dim."""
        ways = self.units[unit].ways.get(name, {})
        return plus(*(self.x[unit][name, way] for way, cut in ways.items() if cut == dim))
