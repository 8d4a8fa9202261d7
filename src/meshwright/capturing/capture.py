"""nn.Module and example batch → Graph: the module is followed with 2 and with 3 samples, see `assemble`."""

from __future__ import annotations

import warnings

import msgspec
from torch import nn

from meshwright.capturing.assemble import FEW, MORE, Assembly, affine
from meshwright.capturing.blocks import block_of_parameter, find_blocks, has_no_forward, in_order_of_calls
from meshwright.capturing.flowing import find_flow
from meshwright.capturing.groups import CannotSkip, Group, find_groups
from meshwright.capturing.recording import Recording
from meshwright.capturing.regions import expert_parameters
from meshwright.capturing.stand_ins import Arithmetic
from meshwright.capturing.trace import trace
from meshwright.core.errors import CaptureError, GuessWarning, ModelError
from meshwright.core.flow import Flow
from meshwright.core.graph import Casting, Graph, Parameter, Precision
from meshwright.models.examples import repeat_samples
from meshwright.models.faked.build import build_followable, can_be_built
from meshwright.models.objective import DEFAULT, Batch, Objective, answered
from meshwright.models.parameters import list_parameters
from meshwright.models.source import ModelSource


def capture(
    module: nn.Module,
    batch: Batch,
    objective: Objective = DEFAULT,
    name: str = "",
    precision: Precision = "fp32",
    casting: Casting = "autocast",
) -> Graph:
    """Follow a module on fake tensors; its own tensors may be on any device, also `meta`."""
    subject = Subject(module, batch, objective, Arithmetic(precision, casting))
    graph = subject.follow(name, find_groups(module, subject.blocks))
    for remark in graph.remarks:
        warnings.warn(remark, GuessWarning, stacklevel=2)
    return graph


def capture_source(source: ModelSource, precision: Precision = "fp32", casting: Casting = "autocast") -> Graph:
    """Capture a named model without giving it memory, where that is possible."""
    if source.example is None:
        raise ModelError(f"{source.name} returned a module alone: return (module, batch) so that it can be followed")
    module = build_followable(source.build)
    try:
        return capture(module, source.example(FEW), source.objective, source.name, precision, casting)
    except CaptureError:
        if not can_be_built(module):
            raise
    # its forward may meet something it keeps of `meta`: with memory it is as in a run
    return capture(source.build(), source.example(FEW), source.objective, source.name, precision, casting)


class Subject:
    """A module with what is needed to follow it."""

    def __init__(self, module: nn.Module, batch: Batch, objective: Objective, arithmetic: Arithmetic) -> None:
        self.module = module
        self.example = repeat_samples(answered(module, batch, objective))
        self.objective = objective
        self.arithmetic = arithmetic
        self.opened: set[str] = set()
        self.blocks = find_blocks(module)

    def follow(self, name: str, groups: list[Group]) -> Graph:
        """Of each group a few blocks are followed for all; where that fails, every block of it."""
        try:
            return self.graph(name, groups)
        except CannotSkip as found:
            return self.follow(name, [group for group in groups if found.group and group != found.group])

    def graph(self, name: str, groups: list[Group]) -> Graph:
        few = self.trace(FEW, groups)
        if opened := self._never_called(few) - self.opened:
            self.opened |= opened
            self.blocks = find_blocks(self.module, self.opened)
            return self.graph(name, find_groups(self.module, self.blocks))
        self.blocks = in_order_of_calls(self.blocks, few.entered)
        more = self.trace(MORE, groups)
        assembly = Assembly(few, more, self.blocks, self._ties())
        classes = {block: type(self.module.get_submodule(block)).__name__ for block in assembly.repeated}
        kinds, blocks = assembly.kinds(classes)
        return Graph(
            model=name or type(self.module).__name__,
            precision=self.arithmetic.precision,
            casting=self.arithmetic.casting,
            parameters=self._parameters(),
            kinds=kinds,
            blocks=blocks,
            timeline=tuple(assembly.timeline),
            buffer_bytes=few.buffer_bytes,
            batch_bytes=affine(few.batch_bytes, more.batch_bytes),
            tokens_per_sample=max(1, self.objective.count(self.example(FEW)) // FEW),
            gradient_order=assembly.gradient_order(),
            guesses=tuple(few.guesses),
            own_recompute=few.own_recompute,
            flow=self._flow(),
        )

    def trace(self, samples: int, groups: list[Group]) -> Recording:
        return trace(self.module, self.example(samples), self.objective, self.blocks, self.arithmetic, groups)

    def _never_called(self, recording: Recording) -> set[str]:
        """Blocks whose parts are called by others, and those that nobody can call."""
        in_parts = {name for name, called in recording.entered.items() if not called}
        unmet = self.blocks.keys() - recording.entered.keys()
        return in_parts | {name for name in unmet if has_no_forward(self.module.get_submodule(name))}

    def _flow(self) -> Flow | None:
        batches = self.example(FEW), self.example(MORE)
        return find_flow(self.module, *batches, self.objective, self.blocks, self.arithmetic)

    def _ties(self) -> dict[str, list[str]]:
        """First name of a tied parameter → its others."""
        found: dict[str, list[str]] = {}
        for parameter in list_parameters(self.module):
            if parameter.tied_to is not None:
                found.setdefault(parameter.tied_to, []).append(parameter.name)
        return found

    def _parameters(self) -> tuple[Parameter, ...]:
        experts = expert_parameters(self.module)
        return tuple(
            msgspec.structs.replace(
                parameter, block=block_of_parameter(parameter.name, self.blocks), expert=parameter.name in experts
            )
            for parameter in list_parameters(self.module)
        )
