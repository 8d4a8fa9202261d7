"""Selective recompute: what lies inside the attention core is not kept, and made again in backward."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from cases import Case, graph_of, source_of
from pool import RankPool
from test_collectives_and_memory import check_categories, train_on_rank
from test_parity import check, compare_on_rank
from torch import Tensor, nn

from meshwright.core.errors import ModelError
from meshwright.cost.compute.recomputed_ops import recomputed_ops
from meshwright.models.gpt import GPT, GPTOptions
from meshwright.runtime import selective as selective_module
from meshwright.runtime.lesson import Lesson
from meshwright.runtime.rebuild import Drawn
from meshwright.runtime.selective import selective
from meshwright.runtime.watch import Watch

Pools = Callable[[int], RankPool]

EAGER = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61,attention=eager"
BROAD = "gpt:layers=4,hidden=64,heads=4,seq=128,vocab=256"
GROUPED = "llama:layers=4,hidden=64,heads=4,kv_heads=2,intermediate=96,seq=128,vocab=256"


@pytest.mark.parametrize(
    "case",
    [
        Case(EAGER, 0, "selective", 2),
        Case(EAGER, 3, "selective", 2),
        Case("gpt", 2, "selective", 1),
        Case("grouped", 3, "selective", 1),
        Case("gpt2", 1, "selective", 2),
        Case("gpt", 2, "every:2", 1),
    ],
    ids=str,
)
def test_two_ranks_agree_with_one_process(pool: Pools, case: Case) -> None:
    check(pool(2).run(compare_on_rank, case, 2))


@pytest.mark.parametrize(
    ("model", "zero", "num_microbatches"),
    [
        (f"{BROAD},attention=eager", 0, 1),
        (f"{BROAD},attention=eager", 0, 4),
        (f"{BROAD},attention=eager", 3, 4),
        (BROAD, 3, 1),
        (BROAD, 0, 4),
        (GROUPED, 0, 1),
    ],
)
def test_memory_by_category(pool: Pools, model: str, zero: int, num_microbatches: int) -> None:
    check_categories(pool(2), Case(model, zero, "selective", num_microbatches, "fp32", samples=16))


def test_recompute_is_seen(pool: Pools) -> None:
    (seen, _) = pool(2).run(train_on_rank, Case(f"{BROAD},attention=eager", 0, "selective", 1, "fp32"), "adam")
    parts, predicted = seen.trace.time_seconds, seen.predicted.time_seconds
    assert 0 < parts.recompute < parts.forward
    assert 0 < predicted.recompute < predicted.forward


@pytest.mark.parametrize("model", [f"{EAGER},dropout=0.1", "gpt", "grouped", "llama", "gpt2"])
def test_what_is_redone_is_what_the_graph_says(model: str) -> None:
    """The rule is one; what it is asked about, ops seen on real and on fake tensors, must be the same too."""
    module, graph = source_of(model).build(), graph_of(model)
    name = graph.repeated_blocks[0]
    kind = graph.kind_by_block[name]
    (lesson,) = lessons_of(module, name, lambda: gradients_of(module, model))
    found = [str(lesson.ops[number].overloadpacket).rpartition(".")[2] for number in sorted(lesson.redone)]
    expected = [kind.ops[number].name for number in sorted(recomputed_ops(kind, "selective"))]
    assert [one for one in found if one != "empty_like"] == expected


def lessons_of(module: nn.Module, name: str, run: Callable[[], object]) -> list[Lesson]:
    """What is learned of a block while something runs."""
    found: list[Lesson] = []
    learn = selective_module.learn
    block = module.get_submodule(name)
    block.forward = selective(block, name, Watch(None))
    with mock.patch.object(selective_module, "learn", lambda *a: found.append(learn(*a)) or found[-1]):
        run()
    return found


def gradients_of(module: nn.Module, model: str) -> list[Tensor]:
    source = source_of(model)
    assert source.example is not None
    batch = source.example(2)
    module.zero_grad()
    torch.manual_seed(1)
    from meshwright.models.objective import call

    source.objective.loss(call(module, batch), batch).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def dropping_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTOptions(layers=2, hidden=32, heads=4, seq=16, vocab=61, dropout=0.3, attention="eager"))


def test_the_same_dropout_is_drawn_again() -> None:
    module = dropping_gpt()
    expected = gradients_of(module, EAGER)
    for name in ("blocks.0", "blocks.1"):
        module.get_submodule(name).forward = selective(module.get_submodule(name), name, Watch(None))
    for _ in range(2):  # once to learn, once as learned
        found = gradients_of(module, EAGER)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with mock.patch.object(Drawn, "before", return_value=None):
        found = gradients_of(module, EAGER)
    assert not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Core(nn.Module):
    """Attention that changes its queries in place, and can go another way or spoil its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.longer = self.spoils = False

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        weights = (query.mul_(0.5) @ key.transpose(-2, -1)).softmax(-1)
        mixed = weights.softmax(-1) @ value
        if self.spoils:
            with torch.no_grad():
                key.add_(1)
        return mixed.sin() if self.longer else mixed


def test_what_changes_while_it_is_waited_for_is_refused() -> None:
    block = Core()
    block.forward = selective(block, "core", Watch(None))
    block.spoils = True
    with pytest.raises(ModelError, match="block 'core' changes in place what its attention core reads"):
        block(torch.rand(2, 4, 8)).sum().backward()


def test_a_block_that_goes_another_way_is_learned_again() -> None:
    plain, block = Core(), Core()
    block.load_state_dict(plain.state_dict())
    ways = (False, True, True, False)
    x = torch.rand(2, 4, 8)

    def run() -> None:
        for longer in ways:
            plain.longer = block.longer = longer
            for module in (plain, block):
                module.zero_grad()
                module(x).square().sum().backward()
            for one, other in zip(plain.parameters(), block.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert torch.equal(one.grad, other.grad)

    found = lessons_of(block, "", run)
    assert len(found) == 2
    assert all(lesson.redone for lesson in found)
