"""Tensors split over ranks: moves between layouts, the rules of torch functions, which shardings are legal."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from cases import ASSETS, ROOT, graph_of, source_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import RankPool, this_rank
from torch import Tensor, nn

from meshwright.capturing.capture import capture_source
from meshwright.core.axes import Axis
from meshwright.core.errors import PlanError
from meshwright.core.plan import BlockSharding, Plan, Stage, TensorSharding
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.measure.parity import ParityResult, compare
from meshwright.models.source import resolve
from meshwright.planner.parity import plain_plan_of_small
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.split import exchange
from meshwright.runtime.split.collectives import Ranks
from meshwright.runtime.split.layout import Addend, Cut, lay, part_shape
from meshwright.runtime.split.legal import legal_plan
from meshwright.runtime.split.rules.views import recut
from meshwright.runtime.split.splitter import NotSplit, Splitter
from meshwright.runtime.split.weights import cut_weights

Pools = Callable[[int], RankPool]

# Moves between layouts


def own_ranks(axis: Axis) -> Ranks:
    return Ranks(axis, dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def numbers(seed: int) -> Tensor:
    return torch.rand(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(whole: Tensor, number: int, size: int, dim: int, runs: int) -> Tensor:
    """By hand: of every run, the number-th piece."""
    return torch.cat([run.chunk(size, dim)[number] for run in whole.chunk(runs, dim)], dim)


def moves_on_rank(axis: Axis, dim: int, runs: int) -> list[str]:
    """Names of the moves that go wrong. Rank r has tensor r and the gradient r of what comes out."""
    ranks, cut = own_ranks(axis), Cut(dim, runs)
    size, own = ranks.size, ranks.rank
    values, slopes = [numbers(r) for r in range(size)], [numbers(100 + r) for r in range(size)]
    common, summands = slopes[0], axis == "cp"
    """tp: the gradient of a whole tensor is the same on all ranks; cp: each has a summand."""
    slope = slopes[own] if summands else common
    full = sum(slopes) if summands else common

    def of(whole: Any, number: int = own) -> Tensor:
        return part(whole, number, size, dim, runs)

    other = Cut(1 - dim)
    swapped = part(values[0], own, size, 1 - dim, 1)
    table = {
        "enter": (values[0], lambda t: exchange.enter(t, ranks), values[0], slopes[own], slopes[own] if summands else sum(slopes)),
        "total": (values[own], lambda t: exchange.total(t, ranks), sum(values), slope, full),
        "scatter": (values[own], lambda t: exchange.scatter(t, ranks, cut), of(sum(values)), of(common), common),
        "gather": (of(values[0]), lambda t: exchange.gather(t, ranks, cut), values[0], slope, of(full)),
        "gather by parts": (
            of(values[0]), lambda t: exchange.gather(t, ranks, cut, read_by_parts=True), values[0], slopes[own], of(sum(slopes)),
        ),
        "narrow": (values[0], lambda t: exchange.narrow(t, ranks, cut), of(values[0]), of(common), alone(common, of, own, ranks, cut) if summands else common),  # noqa: E501
        "swap": (of(values[0]), lambda t: exchange.swap(t, ranks, cut, other), swapped, part(common, own, size, 1 - dim, 1), of(common)),  # noqa: E501
    }  # fmt: skip
    wrong = []
    for name, (given_in, move, expected, gradient, expected_gradient) in table.items():
        leaf = given_in.clone().requires_grad_()
        made = move(leaf)
        made.backward(gradient)
        if not torch.equal(made.detach(), expected) and not torch.allclose(made.detach(), expected):
            wrong.append(f"{name}: forward")
        if leaf.grad is None or not torch.allclose(leaf.grad, expected_gradient):
            wrong.append(f"{name}: backward")
    return wrong


def alone(whole: Tensor, of: Callable[[Tensor, int], Tensor], own: int, ranks: Ranks, cut: Cut) -> Tensor:
    """The whole tensor with zeros where other ranks have their part."""
    mark = of(torch.arange(whole.numel()).view_as(whole), own)
    return torch.where(torch.isin(torch.arange(whole.numel()).view_as(whole), mark), whole, 0.0)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_moves_and_their_gradients(pool: Pools, num_ranks: int) -> None:
    for wrong in pool(num_ranks).run(all_moves_on_rank):
        assert wrong == {}


def all_moves_on_rank() -> dict[str, list[str]]:
    ways = [(axis, dim, runs) for axis in ("tp", "cp") for dim in (0, 1) for runs in (1, 2)]
    return {str(way): wrong for way in ways if (wrong := moves_on_rank(*way))}  # type: ignore[arg-type]


# Rules


def in_place_on_rank() -> list[bool]:
    """A model that goes on with the tensor it changed in place."""
    ranks = own_ranks("tp")
    summand = torch.full((2, 4), -1.0 + 3.0 * ranks.rank, dtype=torch.float64)
    leaf = summand.clone().requires_grad_()
    with Splitter([ranks]) as splitter:
        tensor = lay(leaf * 1, {"tp": Addend()})
        tensor.relu_()
        doubled = tensor * 2
    doubled.sum().backward()
    assert isinstance(splitter, Splitter)
    return [torch.equal(doubled, torch.full_like(doubled, 2.0)), torch.equal(leaf.grad, torch.full_like(leaf, 2.0))]  # type: ignore[arg-type]


def test_what_is_done_in_place_to_a_sum_is_done_to_the_tensor_the_model_holds(pool: Pools) -> None:
    assert pool(2).run(in_place_on_rank) == [[True, True]] * 2


# Reshapes


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, Cut]:
    """Old and new sizes, the degree, and a cut of an old dim."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 2, 3, 4]), min_size=2, max_size=5))

    def grouped() -> tuple[int, ...]:
        sizes, left = [], list(factors)
        while left:
            take = draw(st.integers(1, len(left)))
            sizes.append(prod(left[:take]))
            left = left[take:]
        return tuple(sizes)

    old, new = grouped(), grouped()
    degree = draw(st.sampled_from([2, 3, 4]))
    dim = draw(st.integers(0, len(old) - 1))
    return old, new, degree, Cut(dim, draw(st.sampled_from([1, 2, 3])))


@settings(max_examples=400, deadline=None)
@given(reshapes())
def test_a_reshape_of_the_parts_is_the_part_of_the_reshape(
    case: tuple[tuple[int, ...], tuple[int, ...], int, Cut],
) -> None:
    old, new, degree, cut = case
    size, runs = old[cut.dim] // cut.runs, cut.runs
    if old[cut.dim] % runs or size < degree:
        return
    cut = cut._replace(rest=size % degree)
    whole = torch.arange(prod(old)).view(old)
    ranks = [Ranks("cp", degree, number) for number in range(degree)]
    try:
        then = recut(Splitter([ranks[0]]), "cp", cut, old, new)
    except NotSplit:
        return
    for each in ranks:
        made = each.own_part(whole, cut).reshape(part_shape(new, {"cp": then}, {"cp": each}))
        assert torch.equal(made, each.own_part(whole.view(new), then))


def test_reshapes_that_models_do_stay_cut() -> None:
    split = Splitter([Ranks("tp", 2)])
    assert recut(split, "tp", Cut(2), (3, 5, 32), (3, 5, 4, 8)) == Cut(2), "width into heads"
    assert recut(split, "tp", Cut(2), (3, 5, 4, 8), (3, 5, 32)) == Cut(2), "heads into width"
    assert recut(split, "tp", Cut(1), (3, 4, 7), (12, 7)) == Cut(0, 3), "tokens of three samples in a row"
    assert recut(split, "tp", Cut(0, 3), (12, 7), (3, 4, 7)) == Cut(1)
    with pytest.raises(NotSplit, match="mixes dim 1"):
        recut(split, "tp", Cut(1), (3, 4), (2, 6))


# Which shardings are legal


def plan_over_tp(model: str, tp: int, num_ranks: int | None = None) -> Plan:
    request = PlanRequest(tp=tp, precision="fp64", global_batch=4, microbatch=2)
    return plain_plan(request, graph_of(model), num_ranks or tp, "tests")


def tried(model: str, tp: int) -> Plan:
    source = source_of(model)
    assert source.example is not None
    with torch.device("meta"):
        module = source.build()
    return legal_plan(plan_over_tp(model, tp), module, source.example(2))


def tensors_of(plan: Plan) -> dict[str, TensorSharding]:
    return {tensor.tensor: tensor for rule in plan.sharding for tensor in rule.tensors}


def test_a_fused_query_key_value_is_cut_in_three_runs() -> None:
    found = tensors_of(tried("gpt2", 2))
    assert (found["attn.c_attn.weight"].runs, found["attn.c_attn.bias"].runs) == (3, 3)
    assert {tensor.runs for name, tensor in found.items() if "c_attn" not in name} == {1}


def test_heads_that_do_not_divide_stay_whole_also_where_a_plan_splits_them() -> None:
    """4 heads of width 8: tp=8 would cut heads in two."""
    assert {name.partition(".")[0] for name in tensors_of(tried("gpt", 8))} == {"mlp"}
    source = source_of("gpt")
    assert source.example is not None
    with torch.device("meta"):
        module = source.build()
    by_hand = msgspec.structs.replace(plan_over_tp("gpt", 8), sharding=plan_over_tp("gpt", 2).sharding)
    found = tensors_of(legal_plan(by_hand, module, source.example(2)))
    assert {name.partition(".")[0] for name, tensor in found.items() if "tp" in tensor.dims} == {"mlp"}
    whole = [tensor.reason for name, tensor in found.items() if not name.startswith("mlp.")]
    assert whole
    assert all("4 does not divide over tp=8" in reason for reason in whole)


def test_a_vocabulary_that_does_not_divide_is_left_whole() -> None:
    name = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=1101"
    plan = tried(name, 2)
    whole = [tensor for rule in plan.sharding for tensor in rule.tensors if tensor.reason]
    assert [(tensor.tensor, tensor.dims) for tensor in whole] == [("weight", ("", ""))] * 2
    assert {tensor.reason for tensor in whole} == {"its 1101 rows do not divide over tp=2"}


def parity_on_rank(model: str, plan: Plan) -> ParityResult:
    return compare(source_of(model), plan, 2, this_rank())


@pytest.mark.filterwarnings("ignore::meshwright.core.errors.GuessWarning")
@pytest.mark.parametrize(
    ("function", "said"), [("inverting", "'.*inv.*' has no rule"), ("choosing", "'nonzero' has no rule")]
)
def test_a_block_with_a_function_without_a_rule_is_left_whole_there_and_runs(
    pool: Pools, function: str, said: str
) -> None:
    model = f"{ASSETS}/split_models.py:{function}"
    plan = tried(model, 2)
    found = tensors_of(plan)
    odd = {name: tensor for name, tensor in found.items() if name.startswith("odd.")}
    assert odd
    for tensor in odd.values():
        assert "tp" not in tensor.dims
        assert re.search(said, tensor.reason), tensor.reason
    assert "tp" in found["mlp.up.weight"].dims
    for result in pool(2).run(parity_on_rank, model, plan):
        assert result.first_difference is None


@pytest.mark.filterwarnings("ignore::meshwright.core.errors.GuessWarning")
@pytest.mark.parametrize("function", ["inverting", "choosing"])
def test_a_plan_that_splits_it_anyway_runs_the_function_on_the_whole(pool: Pools, function: str) -> None:
    model = f"{ASSETS}/split_models.py:{function}"
    for result in pool(2).run(parity_on_rank, model, plan_over_tp(model, 2)):
        assert result.first_difference is None


# Weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight


def plan_that_shards(**tensors: tuple[str, ...]) -> Plan:
    rules = tuple(
        BlockSharding(
            for_blocks=(name.partition(".")[0],), tensors=(TensorSharding(tensor=name.partition(".")[2], dims=dims),)
        )
        for name, dims in tensors.items()
    )
    stage = Stage(coordinate=0, blocks=("table", "head"))
    return msgspec.structs.replace(plan_over_tp("gpt", 2), stages=(stage,), sharding=rules, recompute=())


def test_tied_weights_stay_tied() -> None:
    module = Tied()
    whole = module.table.weight.detach().clone()
    plan = plan_that_shards(**{"table.weight": ("tp", ""), "head.weight": ("tp", "")})
    cut_weights(module, plan, Ranks("tp", 2, 1))
    assert module.head.weight is module.table.weight
    assert torch.equal(module.table.weight, whole[4:])


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            {"table.wieght": ("tp", "")},
            "the plan shards 'wieght' of block 'table', which has no such parameter: .*weight",
        ),
        (
            {"table.weight": ("tp",)},
            r"sharding of 'table.weight' has 1 dims, but its shape is \[8, 4\]: give one entry a dim",
        ),
        (
            {"table.weight": ("tp", ""), "head.weight": ("", "tp")},
            "'head.weight' is tied to a tensor that is cut otherwise",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_weights_is_refused(tensors: dict[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        cut_weights(Tied(), plan_that_shards(**tensors), Ranks("tp", 2, 0))


def test_tokens_that_do_not_divide_are_refused_before_ranks_start() -> None:
    """16 patches and the class token: 17, which two ranks cannot share."""
    source = resolve("vit").small()
    request = PlanRequest(tp=2, sequence_parallel=True, global_batch=4, microbatch=2, precision="fp64")
    plan = plain_plan(request, capture_source(source, "fp64"), 2, "tests")
    with pytest.raises(PlanError, match=r"block 'blocks.0' cannot be split: tokens: 17 does not divide over tp=2"):
        try_sharding(plan, source)


def test_only_the_fused_projection_is_cut_in_runs() -> None:
    """GLM's attention comes before its fused MLP: queries in runs would stop the block earlier, which is no help."""
    plan = plain_plan_of_small(f"hf:{ROOT}/tests/survey/decoders/glm.json", PlanRequest(tp=2), 2)
    runs = {t.tensor: t.runs for rule in plan.sharding for t in rule.tensors if "tp" in t.dims}
    assert runs["mlp.gate_up_proj.weight"] == 2
    assert {runs[f"self_attn.{name}_proj.weight"] for name in "qkvo"} == {1}
