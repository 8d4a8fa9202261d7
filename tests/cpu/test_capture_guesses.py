"""Modules that read values: fake tensors have none, so capture answers, says what it assumed, and where."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import ASSETS
from torch import Tensor, nn

import meshwright
from meshwright.capturing.capture import capture_source
from meshwright.core.errors import CaptureError, GuessWarning
from meshwright.core.graph import Graph, Precision
from meshwright.models.source import resolve

WIDTH, SEQ, EXPERTS = 8, 12, 4
LINEAR = 4 * SEQ * WIDTH**2
"""Flops per sample of one linear whose input needs no gradient."""


class Reads(nn.Module):
    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.linear, x)


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.mean()


def capture(module: nn.Module) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GuessWarning)
        return meshwright.capture(module, torch.randn(2, SEQ, WIDTH), loss=mean)


def rows(x: Tensor) -> Tensor:
    """Which positions count: one truth each."""
    return x.sum(-1) > 0


ONE_VALUE = {
    "float": (lambda f, x: f(x) * x.abs().max().item(), "the value of a float32 tensor", "1.0"),
    "integer": (lambda f, x: f(x)[:, : int(x.argmax()) + 1], "the value of a int64 tensor", "1"),
    "truth": (lambda f, x: f(x) if x.sum() > 0 else f(-x), "the value of a bool tensor", "False"),
    "all": (lambda f, x: f(x) if (x > 0).all() else x, "the value of a bool tensor", "True"),
    "list": (lambda f, x: f(x) * sum(x[0, 0].tolist()), "the value of a float32 tensor", "1.0"),
    "equal": (lambda f, x: f(x) if torch.equal(x, x) else x, "whether two tensors are equal", "True"),
    "close": (lambda f, x: f(x) if torch.allclose(x, x) else x, "whether two tensors are equal", "True"),
    "nonzero": (lambda f, x: f(x.flatten(0, 1)[rows(x).flatten().nonzero()[:, 0]]), "how many elements of a mask are true", "all"),
    "where": (lambda f, x: f(x)[torch.where(rows(x))], "how many elements of a mask are true", "all"),
    "mask": (lambda f, x: f(x[rows(x)]), "how many elements of a mask are true", "all"),
    "select": (lambda f, x: f(x).masked_select(x > 0), "how many elements of a mask are true", "all"),
    "unique": (lambda f, x: f(x) * x.unique().numel(), "how many values are distinct", "all"),
    "repeat": (lambda f, x: f(x.repeat_interleave(rows(x)[0].long(), dim=1)), "how often elements are repeated", "once each"),
}  # fmt: skip


@pytest.mark.parametrize("read", ONE_VALUE)
def test_a_value_is_guessed_and_the_guess_recorded(read: str) -> None:
    compute, question, answer = ONE_VALUE[read]
    graph = capture(Reads(compute))
    (guess,) = graph.guesses
    assert (guess.question, guess.answer, guess.module) == (question, answer, "")
    assert guess.line.startswith("test_capture_guesses.py:")
    assert [graph.flops(samples) for samples in (1, 5)] == [LINEAR, 5 * LINEAR]


def test_the_user_is_warned_with_module_and_line() -> None:
    with pytest.warns(GuessWarning, match=r"module 'gate' \(models\.py:\d+\) asks for the value of a bool tensor"):
        graph = capture_source(resolve(f"{ASSETS}/models.py:data_dependent"))
    assert graph.guesses[0].module == "gate"


def test_a_value_that_is_known_is_not_guessed() -> None:
    graph = capture(Reads(lambda f, x: f(x) * torch.tensor(3.0).item()))
    assert graph.guesses == ()


# Routing to experts.


class Experts(nn.Module):
    """Top-k routing written by hand in one of the usual ways."""

    def __init__(self, top: int, run: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.top = top
        self.run = run
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top, dim=-1)
        return self.run(self, tokens, weights, chosen).view_as(x)


def by_one_hot(module: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(tokens)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number, expert in enumerate(module.experts):
        place, token = torch.where(mask[number])
        result.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
    return result


def by_comparing(module: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(tokens)
    for number, expert in enumerate(module.experts):
        token, place = torch.where(chosen == number)
        if (chosen == number).any():
            result.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
    return result


def by_mask(module: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    result = torch.zeros_like(tokens)
    for number, expert in enumerate(module.experts):
        mask = (chosen == number).any(dim=-1)
        result[mask] = expert(tokens[mask])
    return result * weights.sum(-1, keepdim=True)


def by_sorting(module: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.flatten().argsort()
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    parts = (tokens.repeat_interleave(module.top, 0)[order] * weights.flatten()[order, None]).split(counts)
    mixed = torch.cat([expert(part) for expert, part in zip(module.experts, parts, strict=True)])
    return mixed.unflatten(0, (-1, module.top)).sum(1)


def by_number(module: Any, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Those that have tokens, by their numbers as a list of modules takes them; within a capacity."""
    result = torch.zeros_like(tokens)
    taken = F.one_hot(chosen, EXPERTS)
    mask = (taken * (taken.cumsum(0) <= SEQ)).permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, token = torch.where(mask[hit].squeeze(0))
        result.index_add_(0, token, module.experts[int(hit[0])](tokens[token]) * weights[token, place, None])
    return result


@pytest.mark.parametrize("run", [by_one_hot, by_comparing, by_mask, by_sorting, by_number])
def test_every_expert_does_its_share(run: Callable[..., Tensor]) -> None:
    graph = capture(Experts(1, run))
    kinds = {kind.name: kind for kind in graph.kinds}
    ops = [op for block in graph.blocks for op in kinds[block.kind].ops if op.region == "expert"]
    read = {source for op in ops if op.kind == "matmul" for source in op.inputs if isinstance(source, str)}
    assert sum(source.endswith("weight") for source in read) in (1, EXPERTS), (
        read
    )  # blocks of their own, or one for all
    assert len(graph.gradient_order) == 1 + EXPERTS


class Widens(nn.Module):
    """Says in every forward what its router computes in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(self.dtype)
        gates = self.router(x.to(self.dtype)).softmax(-1).to(x.dtype)
        for number in range(20):
            x = x + gates[..., :1].cumsum(1) * number
        return self.linear(x)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_module_that_is_moved_in_forward(precision: Precision) -> None:
    """Tensors from before are given up where the dtype is another: a new one at such an address would be taken for the old one."""
    graphs = [
        meshwright.capture(Widens(torch.float32), torch.randn(2, SEQ, WIDTH), loss=mean, precision=precision)
        for _ in range(5)
    ]
    assert all(graph.kinds == graphs[0].kinds for graph in graphs)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("run", [by_one_hot, by_comparing, by_mask, by_sorting, by_number])
def test_experts_do_the_work_of_those_chosen(run: Callable[..., Tensor], top: int) -> None:
    """An even spread: k of the experts' products for each token, not all of them."""
    graph = capture(Experts(top, run))
    kinds = {kind.name: kind for kind in graph.kinds}
    ops = [op for block in graph.blocks for op in kinds[block.kind].ops]
    products = [op for op in ops if (op.region, op.kind, op.phase) == ("expert", "matmul", "forward")]
    for samples in (1, 4):
        assert sum(op.flops.at(samples) for op in products) == samples * SEQ * top * 2 * WIDTH**2
    assert graph.guesses
    assert {p.name.split(".")[0] for p in graph.parameters if p.expert} == {"experts"}


class Stacked(nn.Module):
    """Experts of one three-dimensional parameter; the class says what they are."""

    class ManyExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
            self.scale = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).unflatten(1, (EXPERTS, -1)).transpose(0, 1).flatten(1, 2) @ self.up

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Stacked.ManyExperts()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(x)


def test_experts_stacked_in_one_parameter() -> None:
    graph = capture(Stacked())
    assert {p.name for p in graph.parameters if p.expert} == {"mixture.up"}
    assert any(op.region == "expert" and op.kind == "matmul" for kind in graph.kinds for op in kind.ops)


# What cannot be guessed.


def test_memory_that_is_read_is_refused_with_module_and_line() -> None:
    said = r"module 'gate' \(models\.py:\d+\) reads a tensor's value \(.*numpy.*cannot be guessed: compute that value outside"
    with pytest.raises(CaptureError, match=said):
        capture_source(resolve(f"{ASSETS}/models.py:reads_memory"))


def test_an_error_names_the_users_line() -> None:
    def wrong(linear: nn.Module, x: Tensor) -> Tensor:
        return linear(x[..., :3])

    with pytest.raises(CaptureError, match=r"module 'linear' \(test_capture_guesses\.py:\d+\) failed in forward"):
        capture(Reads(wrong))


class Counts(nn.Module):
    """Looks at the tokens it is given, as models do that put features of images in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(EXPERTS, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        marked = ids == 1
        if marked.sum() != 3 * ids.shape[0] or not bool((ids[:, 0] == torch.tensor(1)).all()):
            raise ValueError(f"{marked.sum()} marked")
        return self.linear(self.table(ids)[marked])


def test_values_of_the_batch_are_computed_and_not_guessed() -> None:
    ids = torch.zeros(2, SEQ, dtype=torch.int64)
    ids[:, :3] = 1
    graph = meshwright.capture(Counts(), ids, loss=mean)
    assert not graph.guesses
    product = next(op for kind in graph.kinds for op in kind.ops if op.name == "mm" and op.phase == "forward")
    assert product.flops.per_sample == 2 * 3 * WIDTH**2
    with pytest.raises(CaptureError, match="marked"):
        meshwright.capture(Counts(), torch.zeros_like(ids), loss=mean)


def test_what_was_written_into_is_guessed() -> None:
    def fill(linear: nn.Module, x: Tensor) -> Tensor:
        count = torch.zeros((), dtype=torch.int64)
        count += (x > 0).sum()
        return linear(x) * int(count)

    assert len(capture(Reads(fill)).guesses) == 1


class Asserting(nn.Module):
    """Looks for NaN before it goes on, as quantised models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        assert x.isnan().sum() == 0, "NaN"
        return x


def test_no_element_is_nan() -> None:
    assert not meshwright.capture(Asserting(), (torch.randn(2, 4), torch.zeros(2).long())).guesses
