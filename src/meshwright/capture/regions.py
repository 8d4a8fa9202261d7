"""Which ops lie in the attention core, and which among experts.

Attention: from the ops that mix positions (a fused attention, or a softmax between two products of activations), to both
sides along the edges, as long as an op runs in the same module and reads no parameter. So the projections end it, and
rotary positions, scaling, mask, softmax, dropout and the product with the values are in. A backward op is where the
forward op is whose autograd node it belongs to.

Expert: what runs under a module named `experts`, or reads a parameter with a dim for the experts of a module whose class
says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from meshwright.capture.recording import Recording, TracedOp

EXPERTS = "experts"


def expert_parameters(module: nn.Module) -> set[str]:
    """Full names of the parameters that belong to one of several experts."""
    owners = {name for name, part in module.named_modules() if "Expert" in type(part).__name__}
    return {
        name
        for name, tensor in module.named_parameters(remove_duplicate=False)
        if _among_experts(name) or (tensor.dim() == 3 and name.rpartition(".")[0] in owners)
    }


def _among_experts(path: str) -> bool:
    return EXPERTS in path.split(".")


def mark_regions(recording: Recording, module: nn.Module) -> None:
    ops = recording.ops
    weighted = _reading_parameters(ops)
    core = _attention(ops, weighted)
    homes = {(ops[number].block, ops[number].module) for number in core}
    experts = expert_parameters(module)
    for number, op in enumerate(ops):
        if _among_experts(op.block) or _among_experts(op.module) or not experts.isdisjoint(op.inputs):
            op.region = "expert"
        elif op.phase == "forward":
            op.region = "attention" if number in core else ""
        elif op.made_by is not None:
            op.region = ops[op.made_by].region
        elif (op.block, op.module) in homes and number not in weighted:
            op.region = "attention"


def _reading_parameters(ops: list[TracedOp]) -> set[int]:
    """Ops with a parameter among their inputs, also one that was only cast or copied before."""
    found, copies = set(), set()
    for number, op in enumerate(ops):
        from_parameters = [(isinstance(s, str) and not s.startswith("@")) or s in copies for s in op.inputs]
        if any(from_parameters):
            found.add(number)
        if from_parameters and all(from_parameters) and op.kind == "copy":
            copies.add(number)
    return found


def _attention(ops: list[TracedOp], weighted: set[int]) -> set[int]:
    """Numbers of the forward ops of the attention core."""
    inside = {number for number, op in enumerate(ops) if op.phase == "forward" and number not in weighted}
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for number in inside:
        for source in ops[number].inputs:
            if isinstance(source, int) and source in inside and _same_module(ops[source], ops[number]):
                before[number].append(source)
                after[source].append(number)
    found = set()
    for number in inside:
        op = ops[number]
        if op.kind == "attention":
            found |= _reached([number], before) | _reached([number], after)
        elif op.name in ("_softmax", "_safe_softmax"):
            upstream, downstream = _reached([number], before), _reached([number], after)
            if all(any(ops[other].kind == "matmul" for other in side) for side in (upstream, downstream)):
                products = [other for other in downstream if ops[other].kind == "matmul"]
                found |= _reached(products, before) | downstream
    return found


def _same_module(one: TracedOp, other: TracedOp) -> bool:
    return (one.block, one.module) == (other.block, other.module)


def _reached(starts: Iterable[int], steps: dict[int, list[int]]) -> set[int]:
    seen, waiting = set(starts), list(starts)
    while waiting:
        for number in steps[waiting.pop()]:
            if number not in seen:
                seen.add(number)
                waiting.append(number)
    return seen
