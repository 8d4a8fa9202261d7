"""A Witness: hooks and a dispatch mode that say, while a sampled step runs, what the profiler cannot know.

Each finding becomes a range in the profile (`measure/profile.py` lists their names): what lies at an address, and which
collective is called along which axis with how many bytes. Nothing of it is installed outside a sampled step.

    gathered_parameters    a module's parameter in forward that is not held between steps
    gradients              a parameter's gradient, when backward has just added to it, and before the update; sums within a
                           sharding group, when the next microbatch begins
    inputs                 what the module is called with
    passed                 what a collective reads or writes: no category, but it may die where the profiler does not look
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from meshwright.core.axes import Axis
from meshwright.core.collective import Collective, CollectiveKind
from meshwright.runtime._torch import TorchDispatchMode, sums_within_groups, tree_leaves
from meshwright.runtime.axis import named_axis
from meshwright.runtime.clip import local
from meshwright.runtime.mesh import axis_groups
from meshwright.runtime.program import Program

COLLECTIVE_CALLS: dict[str, tuple[CollectiveKind, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_": ("reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
}
"""c10d op → kind, and which argument is the input tensor."""


class Witness:
    """Notes where gathered parameters, gradients and inputs lie, from the beginning of a step to its end."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.held = {address(parameter) for parameter in program.module.parameters()}
        self.watched: set[int] = set()
        self.handles: list[Any] = []

    def __enter__(self) -> Witness:
        for module in self.program.module.modules():
            self.handles.append(module.register_forward_pre_hook(self._see_parameters))
        self.handles += [
            self.program.spread_module.register_forward_pre_hook(self._see_inputs, with_kwargs=True),
            self.program.optimizer.register_step_pre_hook(self._see_gradients),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _see_parameters(self, module: nn.Module, arguments: Any) -> None:
        for parameter in module.parameters():  # those of its parts too: inside a compiled block no hook runs
            if address(parameter) not in self.held:
                note("gathered_parameters", [parameter])
            if parameter.requires_grad and id(parameter) not in self.watched:
                self.watched.add(id(parameter))
                self.handles.append(parameter.register_post_accumulate_grad_hook(self._see_gradient))

    def _see_inputs(self, module: nn.Module, arguments: Any, options: Any) -> None:
        note("inputs", [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)])
        sharded = [part for part in self.program.module.modules() if isinstance(part, FSDPModule)]
        note("gradients", [tensor for part in sharded for tensor in sums_within_groups(part)])

    def _see_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            note("gradients", [parameter.grad])

    def _see_gradients(self, *_: Any) -> None:
        found = (parameter.grad for parameter in self.program.module.parameters())
        note("gradients", [gradient for gradient in found if gradient is not None])


def address(tensor: Tensor) -> int:
    """Where this rank's part of a tensor begins in memory."""
    return int(local(tensor).untyped_storage().data_ptr())


def note(category: str, tensors: Iterable[Tensor]) -> None:
    for place in {address(tensor) for tensor in tensors}:
        with record_function(f"meshwright/note/{category}/{place}"):
            pass


class CollectiveWatch(TorchDispatchMode):
    """Sees every c10d call with its tensors and its group."""

    def __init__(self, program: Program) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Collective] = []
        self.axes: dict[str, Axis] = {}
        groups = axis_groups(program.module, program.mesh)
        for axis in ("dp", "ep", "pp"):  # along cp and tp whoever calls says so: axes of the same ranks share a group
            if axis in groups:
                self.axes.setdefault(groups[axis].group_name, axis)
        if program.pipeline is not None:
            self.axes |= {group.group_name: "pp" for group in program.pipeline.tied.groups.values()}
        self.supports_higher_order_operators = True  # compiled blocks call some; they pass through

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled while this watches; else torch would run it as if it were not."""
        return True

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = str(op.overloadpacket).rpartition(".")[2] if op.namespace == "c10d" else ""
        if name not in COLLECTIVE_CALLS:
            return op(*arguments, **(options or {}))
        kind, position = COLLECTIVE_CALLS[name]
        tensors = [item for item in tree_leaves(arguments[position]) if isinstance(item, Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        axis: Axis = (named_axis() or "pp") if kind == "send" else self._axis(arguments)
        self.found.append(Collective(kind=kind, axis=axis, count=1, total_bytes=num_bytes))
        with record_function(f"meshwright/call/{kind}/{axis}/{num_bytes}"):
            note("passed", [item for item in tree_leaves(arguments) if isinstance(item, Tensor)])
            return op(*arguments, **(options or {}))

    def _axis(self, arguments: Any) -> Axis:
        """The axis that the caller names, else the one whose group is among the arguments; dp where it belongs to none."""
        named = named_axis()
        if named is not None:
            return named
        groups = [
            one for one in arguments if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())
        ]
        return self.axes.get(dist.ProcessGroup.unbox(groups[0]).group_name, "dp") if groups else "dp"
