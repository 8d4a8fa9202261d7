"""Which ops lie in the attention core, and which among experts.

Attention: what lies between the projections, by the rule in rules/attention.py. A backward op is where the forward op is
whose autograd node it belongs to.

Expert: what runs under a module named `experts`, or reads a parameter with a dim for the experts of a module whose class
says so.
"""

from __future__ import annotations

from torch import nn

from meshwright.capturing.recording import Recording
from meshwright.rules.attention import attention_core, reading_parameters

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
    weighted = reading_parameters(ops)
    core = attention_core(ops, weighted)
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
