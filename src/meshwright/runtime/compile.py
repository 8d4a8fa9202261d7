"""Compile: `torch.compile` on the forward of every repeated block, and on the loss.

    what is compiled     why it, and not the whole model
    block                blocks of one kind share one graph: compiling takes the time of one block, however many there are
    recompute inside it  the compiler sees what is redone: it fuses it into backward and leaves out what backward never reads
    loss                 its fp32 copies of the logits, the largest tensors of a language model, are never written

Embeddings, the last norm and the head run as they are: a lookup and a matrix product gain nothing. So do experts, who see
another number of tokens in every call. Only `forward` is compiled. The hooks of data parallelism (gathering, reducing) stay
outside and run as they always do, so blocks are compiled after they are marked for recompute and before they are sharded or
replicated. Shapes are static: every microbatch of a plan has the same.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.core.errors import PlanError
from meshwright.core.files.cache import use_own_compile_cache
from meshwright.core.names import is_list_item
from meshwright.core.plan import Plan
from meshwright.models.experts import find_experts
from meshwright.models.objective import Objective
from meshwright.runtime._torch import FakeTensorMode, compile_replicas_whole, flash_attention

GRAPHS_PER_BLOCK = 2
"""One to train and one to evaluate, where no two blocks are alike."""


def compile_blocks(module: nn.Module, plan: Plan) -> None:
    """Replace the forward of the repeated blocks by a compiled one; of the whole module, where nothing repeats."""
    if not plan.compile:
        return
    _check_links(module)
    use_own_compile_cache()
    compile_replicas_whole()
    for name in find_experts(module):
        part = module.get_submodule(name)
        part.forward = torch.compiler.disable(part.forward)  # other sizes in every call: each would be compiled anew
    repeated = list(filter(is_list_item, plan.blocks))
    blocks = [module.get_submodule(name) for name in repeated or ("",)]
    options = {"dynamic": False, **_room_for(GRAPHS_PER_BLOCK * len(blocks))}
    for block in blocks:
        compiled = torch.compile(block.forward, **options)
        block.forward = _without_flash(compiled) if _has_wrong_flash(block, plan) else compiled


def compile_loss(objective: Objective, plan: Plan) -> Objective:
    """The same objective; under a plan that compiles, with a compiled loss."""
    return (
        dataclasses.replace(objective, loss=torch.compile(objective.loss, dynamic=False)) if plan.compile else objective
    )


def _has_wrong_flash(block: nn.Module, plan: Plan) -> bool:
    """torch 2.11 takes the sums that the flash kernel of a CPU keeps for backward to be float32, whatever it is called with: in
    float64, what it compiles fails in backward."""
    if plan.precision != "fp64" and all(parameter.dtype is not torch.float64 for parameter in block.parameters()):
        return False
    with FakeTensorMode():
        wide = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="cpu")
        _, sums = flash_attention(wide, wide, wide, None, causal=False, scale=1.0)
    return sums.dtype is not torch.float64


def _without_flash(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Attention as single ops, which torch compiles in any dtype."""

    @wraps(forward)
    def called(*arguments: Any, **options: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return forward(*arguments, **options)

    return called


def _check_links(module: nn.Module) -> None:
    """For a CPU torch hands its own folder to the linker as it is: a space in it ends the name."""
    folder = str(Path(torch.__file__).parent)
    on_cpu = all(parameter.device.type in ("cpu", "meta") for parameter in module.parameters())
    if on_cpu and not torch.cuda.is_available() and " " in folder:
        raise PlanError(
            f"torch cannot compile for a CPU from '{folder}', whose name has a space: install it in another folder, or leave "
            "compile out"
        )


def _room_for(num_graphs: int) -> dict[str, Any]:
    """Blocks share their code, and torch stops compiling a piece of code after 8 graphs; 2.11 has no option for more."""
    options = inspect.signature(torch.compile).parameters
    return {"recompile_limit": max(8, num_graphs)} if "recompile_limit" in options else {}
