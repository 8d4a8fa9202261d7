"""The subject of a plan: a model by name, a module with an example batch, or a graph that was captured before.

In 16 bits a model has two graphs (`Casting`): replicas cast as they go, sharded parameters are gathered in 16 bits. A plan is
costed with the one it runs, so a search wants both.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import GuessWarning, InputError
from meshwright.core.graph import Casting, Graph, Precision
from meshwright.core.plan import Plan
from meshwright.planner.graphs import SIXTEEN_BITS, both_castings, graph_of
from meshwright.planner.shardings import remembered, settled, with_legal_sharding

if TYPE_CHECKING:
    from torch import nn

    from meshwright.models.objective import Objective


class Subject(ABC):
    """A model, as far as planning asks about it."""

    @abstractmethod
    def graph(self, precision: Precision, casting: Casting = "autocast") -> Graph: ...

    @abstractmethod
    def with_legal_sharding(self, plan: Plan) -> Plan:
        """The plan with shardings that were tried on the model; refuses one that cannot run."""

    @abstractmethod
    def both_castings(self, precision: Precision) -> tuple[Graph, Graph | None]:
        """The graph that replicas run, and, in 16 bits, the one that sharded plans run."""

    def precision(self, asked: Precision | None, plain: Precision) -> Precision:
        """The precision of the plan: as asked, or else the plain choice on the cluster."""
        return asked or plain


@dataclass(frozen=True)
class NamedModel(Subject):
    """`gpt:layers=12,…`, `path/to/file.py:function` or `hf:CONFIG.json`: its graphs are kept from one command to the next."""

    model: str

    def graph(self, precision: Precision, casting: Casting = "autocast") -> Graph:
        return graph_of(self.model, precision, casting)

    def both_castings(self, precision: Precision) -> tuple[Graph, Graph | None]:
        return both_castings(self.model, precision)

    def with_legal_sharding(self, plan: Plan) -> Plan:
        return with_legal_sharding(plan, self.model)


@dataclass(frozen=True)
class ModuleInMemory(Subject):
    """A module with a batch it can be called with. It is followed on fake tensors: nothing of it changes."""

    module: nn.Module
    batch: Any
    objective: Objective

    def graph(self, precision: Precision, casting: Casting = "autocast") -> Graph:
        from meshwright.capturing.capture import capture

        return capture(self.module, self.batch, self.objective, precision=precision, casting=casting)

    def both_castings(self, precision: Precision) -> tuple[Graph, Graph | None]:
        plain = self.graph(precision)
        if precision not in SIXTEEN_BITS:
            return plain, None
        with warnings.catch_warnings(action="ignore", category=GuessWarning):  # what there is to say was said
            return plain, self.graph(precision, "parameters")

    def with_legal_sharding(self, plan: Plan) -> Plan:
        from meshwright.runtime.split.legal import legal_plan

        return legal_plan(plan, self.module, self.batch)


@dataclass(frozen=True)
class GivenGraph(Subject):
    """A graph: planned in the precision it was captured in. Where its module is still in this process, shardings are tried on it,
    and it is captured in the other casting; else all plans are costed with the graph."""

    given: Graph

    def graph(self, precision: Precision, casting: Casting = "autocast") -> Graph:
        if casting == self.given.casting or precision not in SIXTEEN_BITS:
            return self.given
        return self._in_other_casting(casting) or self.given

    def both_castings(self, precision: Precision) -> tuple[Graph, Graph | None]:
        if precision not in SIXTEEN_BITS:
            return self.given, None
        return self.given, self._in_other_casting("parameters" if self.given.casting == "autocast" else "autocast")

    def _in_other_casting(self, casting: Casting) -> Graph | None:
        if (found := remembered(self.given.identity)) is None:
            return None
        model, batch, objective = found
        with warnings.catch_warnings(action="ignore", category=GuessWarning):  # what there is to say was said
            return ModuleInMemory(model, batch, objective).graph(self.given.precision, casting)

    def with_legal_sharding(self, plan: Plan) -> Plan:
        return settled(plan)

    def precision(self, asked: Precision | None, plain: Precision) -> Precision:
        if asked not in (None, self.given.precision):
            raise InputError(
                f"precision={asked}, but the graph was captured in {self.given.precision}: give the module with batch=, or "
                f"capture it with precision='{asked}'"
            )
        return self.given.precision


def subject_of(model: str | nn.Module | Graph, batch: Any = None, loss: Any = None, count: Any = None) -> Subject:
    """The subject for a model as it was given."""
    if isinstance(model, (str, Graph)):
        if any(given is not None for given in (batch, loss, count)):
            raise InputError("batch, loss and count go with a module; a model's name or a graph has its own")
        return NamedModel(model) if isinstance(model, str) else GivenGraph(model)
    if not _is_module(model):
        raise InputError(
            f"the model is a {type(model).__name__}: give a module with batch=, a model's name, or a Graph"
        )
    if batch is None:
        raise InputError("no batch was given: a module is followed with an example of what it is called with, batch=…")
    from meshwright.models.objective import objective_of

    return ModuleInMemory(model, batch, objective_of(loss, count))


def _is_module(model: object) -> bool:
    from torch import nn

    return isinstance(model, nn.Module)
