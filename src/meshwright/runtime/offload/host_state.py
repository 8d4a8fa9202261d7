"""Which parameters keep their optimizer state on the host and which on the device, and the memory of the former."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.core.errors import PlanError
from meshwright.core.plan import Offload, Plan
from meshwright.rules.groups import num_kept, order_of_need, place_of
from meshwright.runtime.clip import local
from meshwright.runtime.lowered import Values, fill_rest
from meshwright.runtime.offload.host import FileMemory, HostMemory, check_host_memory
from meshwright.runtime.offload.kept import Kept
from meshwright.runtime.offload.pieces import MOMENTS, Layout, Piece, Shipped, ship
from meshwright.runtime.offload.rules import AdamRule, Rule, find_rule, is_by_entry, is_plain_adam
from meshwright.runtime.offload.threads import num_threads

Named = list[tuple[str, nn.Parameter]]


class HostState:
    def __init__(
        self, module: nn.Module, optimizer: Optimizer, plan: Plan, device: torch.device, values: Values | None,
        sums_on_host: bool, num_ranks_here: int,
    ) -> None:  # fmt: skip
        """values: of parameters that the device has in 16 bits, still without them. sums_on_host: whether gradients of microbatches
        are added up there."""
        found = _trained(module, optimizer, plan)
        _check_shape_free(optimizer, found)
        sizes = [local(parameter.detach()).numel() for _, parameter in found]
        kept = num_kept(sizes, plan.offload.share)
        dtype = found[0][1].dtype if found else torch.float32
        master_dtype = dtype if values is None else torch.float32
        self.rule = find_rule(optimizer, master_dtype, num_threads(num_ranks_here))
        _check_state_is_ours(optimizer, self.rule, plan.offload)
        self.layout = Layout(
            dtype=dtype,
            master_dtype=master_dtype,
            num_slots=2 if plan.offload.delayed else 1,
            has_sums=sums_on_host,
            num_moments=len(MOMENTS) if isinstance(self.rule, AdamRule) else 0,
            moment_dtype=torch.bfloat16 if plan.offload.moments == "bf16" else master_dtype,
        )
        self.memory = _take_memory(self.layout, sizes[kept:], device, num_ranks_here, plan.offload)
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        by_entry = is_by_entry(optimizer)
        self.shipped = [
            ship(
                name, place_of(name, plan.blocks), parameter, place, groups[id(parameter)], self.layout, self.memory,
                _taken(values, name, parameter), by_entry,
            )
            for place, (name, parameter) in enumerate(found[kept:], start=kept)
        ]  # fmt: skip
        self.kept = [
            Kept(name, place_of(name, plan.blocks), parameter, groups[id(parameter)], _master(values, name, parameter))
            for name, parameter in found[:kept]
        ]
        self.holders: list[Shipped | Kept] = [*self.kept, *self.shipped]
        if values is not None:
            fill_rest(module, values)

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for one in self.shipped for piece in one.pieces)

    @property
    def host_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self.memory)

    def close(self) -> None:
        self.rule.close()
        for memory in self.memory:
            memory.close()


def _trained(module: nn.Module, optimizer: Optimizer, plan: Plan) -> Named:
    """What the optimizer updates, as forward needs it."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) in mine]
    return order_of_need(named, plan.blocks)


def _check_shape_free(optimizer: Optimizer, found: Named) -> None:
    if not is_by_entry(optimizer) and any(isinstance(parameter, DTensor) for _, parameter in found):
        raise PlanError(
            f"{type(optimizer).__name__} may look at whole tensors, but ranks hold parts of them, and offload updates each part by "
            "itself: use an optimizer that treats every entry by itself (AdamW, SGD), or a plan without ZeRO"
        )


def _check_state_is_ours(optimizer: Optimizer, rule: Rule, offload: Offload) -> None:
    """What torch makes for a piece is fp32, and in memory."""
    wishes = {"moments in bf16": offload.moments == "bf16", "optimizer state on disk": offload.where == "disk"}
    asked = [words for words, is_asked in wishes.items() if is_asked]
    if not asked or isinstance(rule, AdamRule):
        return
    why = (
        "that needs masters in fp32 and a C compiler, and one of them is not there"
        if is_plain_adam(optimizer)
        else f"only Adam and AdamW with plain options are updated so, not {type(optimizer).__name__} as it is set"
    )
    raise PlanError(
        f"the plan keeps {' and '.join(asked)}: {why}; change that, or keep fp32 moments in the host's memory"
    )


def _take_memory(
    layout: Layout, sizes: list[int], device: torch.device, num_ranks: int, offload: Offload
) -> tuple[HostMemory, HostMemory]:
    """Pinned, and plain or in a file."""
    pinned, plain = layout.pinned_bytes(sizes), layout.plain_bytes(sizes)
    words = f"offload of the optimizer state of {sum(sizes):,} parameters"
    if offload.where == "disk":
        return HostMemory(pinned, device, words, num_ranks), FileMemory(plain, Path(offload.folder), words, num_ranks)
    check_host_memory((pinned + plain) * num_ranks, words)
    return HostMemory(pinned, device, words), HostMemory(plain, torch.device("cpu"), words)


def _taken(values: Values | None, name: str, parameter: nn.Parameter) -> Tensor:
    """What a master on the host starts with; the device gets it too, where it has nothing yet."""
    value = None if values is None else values.take(name)
    if value is None:
        return local(parameter.detach())
    parameter.detach().copy_(value)
    return value


def _master(values: Values | None, name: str, parameter: nn.Parameter) -> Tensor | None:
    """The same for one on the device; None where the parameter is its own master."""
    if values is None:
        return None
    return _taken(values, name, parameter).to(parameter.device, copy=True)
