"""The weights that are sharded over tp: the plain choice, and the sharding of a plan. Consequences for the ops: rules/labels.py.

The plain choice follows a block in order: a weight that reads a whole tensor is split by its outputs if a later weight reads
what came of it, and that one is split by its inputs. For a transformer this is Megatron's: query, key, value and the MLP's
first layer by outputs, the projection back into the stream by inputs, one all-reduce each way for attention and MLP. The
table of tokens and the head that makes logits are split by the vocabulary. Attention whose heads do not divide over tp, and a
weight whose outputs do not, stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from meshwright.core.errors import PlanError, nearest
from meshwright.core.graph import Graph, Kind, Op, Parameter, Source
from meshwright.core.names import compact_names, expand_names
from meshwright.core.plan import BlockSharding, Plan, TensorSharding
from meshwright.rules.context import num_heads
from meshwright.rules.labels import Way, labels_of, way_of, weight_copies

WHOLE = "@whole"
"""Origin of a tensor that must stay whole; no weight has this name."""
VOCABULARY_ROWS = 1024
"""A table or head of fewer rows is not worth splitting: it is a table of positions, a router or a small classifier."""


def plain_sharding(graph: Graph, tp: int = 1) -> tuple[BlockSharding, ...]:
    """The tensors split over tp, for every kind of block, as the plan writes them: by the names of the kind's blocks.

    tp: the degree, where it is known: what does not divide over it stays whole.
    """
    tables = (
        parameters[weight].shape[0]
        for kind, parameters in _kinds(graph)
        for op in kind.ops
        if op.name == "embedding" and (weight := weight_of(op, parameters, {})) is not None
    )
    rows = max(tables, default=0)
    found = _rules(graph, lambda kind, parameters: plain_ways(kind, parameters, rows, tp))
    return found or _rules(graph, lambda kind, parameters: _by_inputs(kind, parameters, tp))


def _by_inputs(kind: Kind, parameters: dict[str, Parameter], tp: int) -> dict[str, Way]:
    """Where every layer is a block of its own, as in a plain `nn.Sequential`, no layer in a block reads another's columns: each is
    split by its inputs, of which a rank takes its part."""
    copies = weight_copies(kind)
    applied = [op for _, op in kind.forward_ops if op.kind == "matmul" and op.region != "attention"]
    weights = {name: op for op in applied if (name := weight_of(op, parameters, copies)) is not None}
    return {name: "row" for name, op in weights.items() if num_inputs(op) % tp == 0}


def _rules(graph: Graph, choose: Callable[[Kind, dict[str, Parameter]], dict[str, Way]]) -> tuple[BlockSharding, ...]:
    """The sharding rules of every kind, by the names of its blocks."""
    found = []
    for kind, parameters in _kinds(graph):
        names = [block.name for block in graph.blocks if block.kind == kind.name and block.name]
        found.append(block_sharding(names, kind, parameters, choose(kind, parameters)))
    return tuple(rule for rule in found if rule is not None)


def block_sharding(
    blocks: Iterable[str], kind: Kind, parameters: dict[str, Parameter], ways: dict[str, Way]
) -> BlockSharding | None:
    """The sharding rule of blocks whose weights are split in these ways; None where none is."""
    names = compact_names(blocks)
    along = _along_columns(ways, kind, parameters) if ways else set()
    split = []
    for name, parameter in parameters.items():
        dims = [""] * len(parameter.shape)
        if name in ways:
            dims[split_dim(ways[name], outputs_are_first(name, kind, parameters))] = "tp"
        elif name in along:
            dims[0] = "tp"
        if any(dims):
            split.append(TensorSharding(tensor=name, dims=tuple(dims)))
    return BlockSharding(for_blocks=names, tensors=tuple(split)) if names and split else None


def _kinds(graph: Graph) -> Iterator[tuple[Kind, dict[str, Parameter]]]:
    """Each kind with the parameters of its first block, by the name ops call them."""
    for kind in graph.kinds:
        first = next((block.name for block in graph.blocks if block.kind == kind.name), None)
        if first is not None:
            yield kind, {parameter.own_name: parameter for parameter in graph.parameters_of([first])}


def plain_ways(kind: Kind, parameters: dict[str, Parameter], table_rows: int = 0, tp: int = 1) -> dict[str, Way]:
    """The weights to split, and how: columns that a row-parallel weight reads, the table of tokens (`table_rows`), the head."""
    ways: dict[str, Way] = {}
    origins: dict[int, set[str]] = {}
    used: set[str] = set()
    copies = weight_copies(kind)
    biases: dict[Source, str] = {}
    for number, op in enumerate(kind.ops):
        if op.phase != "forward":
            break
        came_from = {name for source in op.inputs if isinstance(source, int) for name in origins.get(source, ())}
        weight = weight_of(op, parameters, copies)
        origins[number] = came_from
        is_undivided = any(heads % tp for heads in num_heads(op))  # attention whose heads do not divide over tp
        if WHOLE in came_from or is_undivided:
            origins[number] = {WHOLE} if weight is None else set()
            continue
        if weight is None:
            met = [biases[source] for source in op.inputs if source in biases]
            if met and came_from and op.region == "attention":  # a bias for every head meets scores split by heads
                ways |= dict.fromkeys(met, "heads")
            elif met and not came_from:
                biases[number] = met[0]
            continue
        if is_depthwise(op, parameters[weight]):
            continue  # each channel by itself: as what it reads
        rows = num_outputs(op)
        if op.name == "embedding":
            if parameters[weight].shape[0] >= max(table_rows, VOCABULARY_ROWS):
                ways[weight] = "table"
            elif "@batch" not in op.inputs:
                biases[number] = weight
        elif came_from and rows <= num_inputs(op):
            ways[weight] = "row"
            used |= came_from
            origins[number] = set()
        elif not came_from:
            outputs = split_dim("column", outputs_are_first(weight, kind, parameters))
            if parameters[weight].shape[outputs] % tp == 0 or _is_head(weight, parameters):
                ways[weight] = "column"
                origins[number] = {weight}
    return {name: way for name, way in ways.items() if way != "column" or name in used or _is_head(name, parameters)}


def is_depthwise(op: Op, weight: Parameter) -> bool:
    return op.kind == "convolution" and weight.shape[1] == 1 and num_inputs(op) == weight.shape[0] > 1


def _is_head(name: str, parameters: dict[str, Parameter]) -> bool:
    """A lone layer with very many outputs makes logits: the loss reads them split."""
    shape = parameters[name].shape
    alone = sum(len(parameter.shape) > 1 for parameter in parameters.values()) == 1
    return alone and len(shape) == 2 and max(shape) >= VOCABULARY_ROWS and max(shape) >= 2 * min(shape)


def weight_of(op: Op, parameters: dict[str, Parameter], copies: dict[Source, str]) -> str | None:
    """The matrix, filter or table an op applies: of two parameters (learned queries through a layer) the latter."""
    if op.kind not in ("matmul", "convolution") and op.name != "embedding":
        return None
    for source in reversed(op.inputs):
        name = copies.get(source, source)
        parameter = parameters.get(name) if isinstance(name, str) else None
        if parameter is not None and len(parameter.shape) > 1 and not parameter.expert:
            return str(name)
    return None


def num_outputs(op: Op) -> float:
    return op.result_shape[1 if op.kind == "convolution" else -1].fixed if op.result_shape else 0.0


def num_inputs(op: Op) -> float:
    """Features of the tensor the weight is applied to."""
    shape = op.activation_shape
    return shape[1 if op.kind == "convolution" else -1].fixed if shape else 0.0


def _along_columns(ways: dict[str, Way], kind: Kind, parameters: dict[str, Parameter]) -> set[str]:
    """Parameters that are split with their columns or channels: biases, batch norms and depthwise filters."""
    labels, copies = labels_of(kind, ways), weight_copies(kind)
    found: set[str] = set()
    for _, op in kind.forward_ops:
        own = [parameters[name] for s in op.inputs if (name := str(copies.get(s, s))) in parameters]
        if op.kind in ("matmul", "convolution") and way_of(op, ways, copies) == "column":
            found |= {p.own_name for p in own if len(p.shape) == 1}
        if any(labels.of(source) == "split" for source in op.inputs if isinstance(source, int)):
            is_norm = "batch_norm" in op.name
            found |= {p.own_name for p in own if is_norm or (len(p.shape) > 1 and is_depthwise(op, p))}
    return found


def split_dim(way: Way, outputs_first: bool) -> int:
    """The dim of a weight that is sharded over tp. Linear keeps [outputs, inputs]; a few models keep [inputs, outputs]."""
    if way == "table":
        return 0
    if way == "heads":
        return 1
    return 0 if (way == "column") == outputs_first else 1


def outputs_are_first(name: str, kind: Kind, parameters: dict[str, Parameter]) -> bool:
    """Told by the result's width where a weight is not square; a square one is like the others of its kind. Filters have
    their outputs first."""
    if len(parameters[name].shape) > 2:
        return True
    votes = {}
    copies = weight_copies(kind)
    for _, op in kind.forward_ops:
        weight = weight_of(op, parameters, copies) if op.kind == "matmul" else None
        if weight is not None and op.result_shape and len(set(parameters[weight].shape)) > 1:
            votes[weight] = parameters[weight].shape[0] == op.result_shape[-1].fixed
    return votes.get(name, next(iter(votes.values()), True))


# ---------------------------------------------------------------- what a plan says


def rules_by_block(plan: Plan, graph: Graph) -> dict[str, BlockSharding]:
    """Block → what the plan says of its tensors; nothing without tp."""
    if plan.mesh.tp == 1:
        return {}
    of_kind = {rule.for_kind: rule for rule in plan.sharding if rule.for_kind is not None}
    of_block = {name: rule for rule in plan.sharding for name in expand_names(rule.for_blocks)}
    rules = {block.name: of_block.get(block.name) or of_kind.get(block.kind) for block in graph.blocks}
    return {name: rule for name, rule in rules.items() if rule is not None}


def ways_by_block(plan: Plan, graph: Graph) -> dict[str, dict[str, Way]]:
    """For every block, the weights the plan splits over tp, and how."""
    by_kind = {kind.name: (kind, parameters) for kind, parameters in _kinds(graph)}
    unknown = {rule.for_kind for rule in plan.sharding if rule.for_kind is not None} - by_kind.keys()
    if unknown:
        raise PlanError(
            f"sharding is for kind '{min(unknown)}', which the model does not have: {nearest(min(unknown), by_kind)}"
        )
    rules = rules_by_block(plan, graph)
    read: dict[
        tuple[str, int], dict[str, Way]
    ] = {}  # one for all blocks of a kind, so that they share what follows from it
    nothing: dict[str, Way] = {}
    found = {}
    for block in graph.blocks:
        rule = rules.get(block.name)
        key = (block.kind, id(rule))
        if rule is not None and key not in read:
            read[key] = _read_ways(rule, *by_kind[block.kind])
        found[block.name] = read.get(key, nothing)
    return found


def _read_ways(rule: BlockSharding, kind: Kind, parameters: dict[str, Parameter]) -> dict[str, Way]:
    tables = {weight_of(op, parameters, {}) for op in kind.ops if op.name == "embedding"}
    ways: dict[str, Way] = {}
    for tensor in rule.tensors:
        parameter = parameters.get(tensor.tensor)
        if parameter is None:
            raise PlanError(
                f"sharding for kind '{kind.name}' names tensor '{tensor.tensor}', which its blocks do not have: "
                f"{nearest(tensor.tensor, parameters)}"
            )
        if len(tensor.dims) != len(parameter.shape):
            raise PlanError(
                f"sharding of '{tensor.tensor}' has {len(tensor.dims)} dims, but its shape is {list(parameter.shape)}: "
                "give one entry a dim, empty where it is whole"
            )
        if len(tensor.dims) < 2 or "tp" not in tensor.dims:
            continue
        dim = tensor.dims.index("tp")
        if tensor.tensor in tables:
            ways[tensor.tensor] = "heads" if dim else "table"
        elif len(parameter.shape) > 2 and parameter.shape[1] == 1:
            continue  # a depthwise filter goes with its channels
        else:
            ways[tensor.tensor] = (
                "column" if (dim == 0) == outputs_are_first(tensor.tensor, kind, parameters) else "row"
            )
    return ways
