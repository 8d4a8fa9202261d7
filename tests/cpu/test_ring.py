"""Ring attention: keys and values go round the cp ranks. The same as one process, with the collectives that cost/ predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import RankPool
from table import Row, fill, graph_of, row
from torch import Tensor

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.split import pieces
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Cut, lay, layout_of
from meshwright.runtime.split.splitter import NotSplit, Splitter

Pools = Callable[[int], RankPool]

CELLS = [
    ("gpt", row(2, cp=2, context="ring")),
    ("Llama", row(2, cp=2, context="ring")),
    ("BERT", row(2, cp=2, context="ring")),
    ("gpt", row(4, cp=4, context="ring")),
    ("Llama", row(4, tp=2, cp=2, context="ring")),
    ("gpt", row(4, tp=2, sequence_parallel=True, cp=2, context="ring")),
    ("GPT-2", row(4, cp=2, context="ring", pp=2)),
    ("gpt", row(4, cp=2, context="ring", zero=3)),
    ("T5", row(2, cp=2, context="ring")),
    ("Mixtral", row(2, cp=2, context="ring")),
    ("gpt", row(2, cp=2, context="ring", recompute="full")),
    ("Llama", row(2, cp=2, context="ring", recompute="selective")),
]


@pytest.mark.parametrize(("model", "plan"), CELLS, ids=str)
def test_agrees_with_one_process(pool: Pools, model: str, plan: Row) -> None:
    cell = fill(pool(plan.num_ranks), model, plan)
    assert not cell.refused
    assert cell.ok, cell.wrong
    assert cell.result is not None
    assert cell.result.max_loss_difference <= 1e-14
    assert cell.result.num_tensors > 0


# One attention

SAMPLES, HEADS, TOKENS, WIDTH = 2, 6, 16, 8


def documents() -> Tensor:
    """Three packed sequences: no token sees another document, nor ahead. Whole pieces are hidden from some rows."""
    ids = torch.tensor([0] * 3 + [1] * 9 + [2] * 4)
    return (ids[:, None] == ids) & torch.ones(TOKENS, TOKENS).tril().bool()


def hidden_rows() -> Tensor:
    """Of padding nothing is seen at all."""
    mask = documents()
    mask[5] = False
    return mask[None, None].expand(SAMPLES, 1, -1, -1)


def added() -> Tensor:
    return torch.randn(HEADS, TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def padding() -> Tensor:
    return torch.arange(TOKENS).lt(11)[None, None, None]


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all see all": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "scaled": ({}, {"is_causal": True, "scale": 0.7}),
    "few heads of keys": ({"key_heads": 2}, {"is_causal": True, "enable_gqa": True}),
    "one head of keys": ({"key_heads": 1}, {"enable_gqa": True}),
    "other tokens": ({"num_keys": 24}, {}),
    "narrow values": ({"value_width": 4}, {"is_causal": True}),
    "packed": ({}, {"attn_mask": documents()}),
    "hidden rows": ({}, {"attn_mask": hidden_rows()}),
    "added": ({}, {"attn_mask": added()}),
    "padding": ({}, {"attn_mask": padding()}),
    "packed, narrow values": ({"value_width": 4}, {"attn_mask": documents()}),
    "learned": ({}, {"attn_mask": added().requires_grad_()}),
}


def tensors(key_heads: int = HEADS, num_keys: int = TOKENS, value_width: int = WIDTH) -> list[Tensor]:
    torch.manual_seed(7)
    shapes = [
        (SAMPLES, HEADS, TOKENS, WIDTH),
        (SAMPLES, key_heads, num_keys, WIDTH),
        (SAMPLES, key_heads, num_keys, value_width),
    ]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def attend_on_rank(name: str, num_rows: int) -> list[float]:
    """Largest differences of the result and of each gradient, between all tokens and this rank's."""
    pieces.ROWS = num_rows
    sizes, options = CALLS[name]
    whole = [tensor.requires_grad_() for tensor in tensors(**sizes)]
    factors = torch.rand(SAMPLES, HEADS, TOKENS, whole[2].shape[-1], dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*whole, **options)
    (expected * factors).sum().backward()
    mask = options.get("attn_mask")
    of_mask = mask.grad if mask is not None and mask.requires_grad else None
    if of_mask is not None:
        mask.grad = None
    ranks, cut = Ranks("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, folded=True), Cut(2)
    own = [lay(ranks.own_part(t.detach(), cut).clone().requires_grad_(), {"cp": cut}) for t in whole]
    with Splitter([ranks], context="ring"):
        found = F.scaled_dot_product_attention(*own, **options)
    assert layout_of(found) == {"cp": cut}
    (found * ranks.own_part(factors, cut)).sum().backward()
    pairs = [(found, expected), *((part.grad, tensor.grad) for part, tensor in zip(own, whole, strict=True))]
    differences = [float((one - ranks.own_part(other, cut)).abs().max()) for one, other in pairs]
    return differences if of_mask is None else [*differences, float((ranks.add_up(mask.grad) - of_mask).abs().max())]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_one_attention(pool: Pools, name: str, num_ranks: int) -> None:
    for differences in pool(num_ranks).run(attend_on_rank, name, 3):
        assert max(differences) < 1e-13


def grow_on_rank(num_tokens: int) -> int:
    """Bytes of the largest tensor that any op of an attention makes, forward and backward."""
    from meshwright.runtime._torch import TorchDispatchMode, tree_leaves

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            made = op(*arguments, **(options or {}))
            sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            Largest.found = max([Largest.found, *sizes])
            return made

    ranks, cut = Ranks("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, folded=True), Cut(2)
    own = [lay(torch.randn(1, 2, num_tokens // ranks.size, 8, requires_grad=True), {"cp": cut}) for _ in range(3)]
    with Largest():
        with Splitter([ranks], context="ring"):
            found = F.scaled_dot_product_attention(*own, is_causal=True)
        found.sum().backward()
    return Largest.found


def test_memory_grows_with_the_tokens_not_with_their_square(pool: Pools) -> None:
    few, many = (max(pool(2).run(grow_on_rank, num_tokens)) for num_tokens in (1024, 4096))
    assert few < many <= 4 * few


# Refusals


@pytest.mark.parametrize(
    ("reason", "number", "options"),
    [
        ("query, key and value do not lie alike", 1, {}),
        ("tokens are cut in runs", None, {}),
        ("no token looks ahead, but keys are of other tokens", None, {"is_causal": True}),
    ],
)
def test_what_a_ring_cannot_do_is_refused(reason: str, number: int | None, options: dict[str, Any]) -> None:
    own = tensors(num_keys=24 if "other tokens" in reason else TOKENS)
    runs = 2 if "runs" in reason else 1
    for place, tensor in enumerate(own):
        if place != number:
            lay(tensor, {"cp": Cut(2, runs)})
    with Splitter([Ranks("cp", 2, folded=True)], context="ring"), pytest.raises(NotSplit, match=reason):
        F.scaled_dot_product_attention(*own, **options)


# What a plan says


def plan_of(**asked: Any) -> Plan:
    wish = PlanRequest(microbatch=2, global_batch=4, **asked)
    return plain_plan(wish, graph_of("gpt", "fp32"), 8, "tests")


def test_a_ring_is_the_plain_choice_where_heads_do_not_divide() -> None:
    assert plan_of(cp=4).context == "heads"
    assert plan_of(cp=8).context == "ring"
    assert plan_of(cp=4, tp=2).context == "ring"
    assert plan_of(cp=4, context="ring").context == "ring"
