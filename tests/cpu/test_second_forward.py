"""Full recompute: how far the second forward goes is what the estimate counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import Case, graph_of, plan_of, source_of
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.core.cluster import FLOP_KINDS
from meshwright.core.graph import Kind
from meshwright.cost.compute.recomputed_ops import last_needed
from meshwright.models.objective import call
from meshwright.runtime.recompute import mark_recompute
from meshwright.runtime.watch import Watch


class Inside(Watch):
    """Knows whether a second forward runs."""

    def __init__(self) -> None:
        super().__init__(None)
        self.again = False

    @contextmanager
    def region(self, name: str) -> Iterator[None]:  # type: ignore[override]
        self.again = name == "recompute"
        try:
            yield
        finally:
            self.again = False


class Heavy(TorchDispatchMode):
    """Notes products and attention that run in second forwards."""

    def __init__(self, watch: Inside, names: set[str]) -> None:
        super().__init__()
        self.watch, self.names = watch, names
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if self.watch.again and name in self.names:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def heavy(kind: Kind, end: int) -> list[str]:
    return [op.name for op in kind.ops[:end] if op.phase == "forward" and op.kind in FLOP_KINDS]


@pytest.mark.parametrize(
    ("model", "to_the_end"),
    [("gpt", False), ("grouped", False), ("llama", False), ("vit", False), ("gpt2", True), ("bert", True)],
)
def test_it_ends_where_the_estimate_says(model: str, to_the_end: bool) -> None:
    """Where a norm or a dropout follows the last product, its result is needed; where a sum does, it is not."""
    source, graph = source_of(model), graph_of(model)
    plan = plan_of(Case(model, 0, "full", 1), num_ranks=1)
    module, watch = source.build(), Inside()
    mark_recompute(module, plan, watch)
    assert source.example is not None
    batch = source.example(2)
    kinds = [graph.kind_by_block[name] for name in plan.recomputed("full")]
    noted = Heavy(watch, {op.name for kind in kinds for op in kind.ops if op.kind in FLOP_KINDS})
    torch.manual_seed(1)
    loss = source.objective.loss(call(module, batch), batch)
    with noted:
        loss.backward()
    expected = [name for kind in reversed(kinds) for name in heavy(kind, last_needed(kind))]
    everything = [name for kind in kinds for name in heavy(kind, len(kind.ops))]
    assert sorted(noted.found) == sorted(expected)
    assert (len(expected) == len(everything)) == to_the_end
