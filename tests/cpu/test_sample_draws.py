"""Random numbers by sample: under every plan a model with dropout has the losses and gradients that one process has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import graph_of
from pool import RankError, RankPool, this_rank
from torch import Tensor, nn

from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.models.objective import DEFAULT, Batch, Objective
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.program import Program

Pools = Callable[[int], RankPool]
GPT = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=64,dropout=0.1"
EAGER = f"{GPT},attention=eager"
GLOBAL_BATCH = 8
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one, 4 microbatches": (1, {"microbatch": 2}),
    "one sample a microbatch": (1, {"microbatch": 1}),
    "one, recompute": (1, {"recompute": "full", "microbatch": 2}),
    "one, selective": (1, {"recompute": "selective", "microbatch": 4}),
    "dp2": (2, {"dp": 2}),
    "dp2, 2 microbatches": (2, {"dp": 2, "microbatch": 2}),
    "dp2 zero3": (2, {"dp": 2, "zero": 3, "microbatch": 2}),
    "dp2 zero3 recompute": (2, {"dp": 2, "zero": 3, "recompute": "full"}),
    "pp2": (2, {"pp": 2, "microbatch": 2}),
    "pp2 recompute": (2, {"pp": 2, "microbatch": 2, "recompute": "full"}),
    "tp2": (2, {"tp": 2, "microbatch": 4}),
    "tp2 sequence parallel": (2, {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
    "cp2 heads": (2, {"cp": 2, "context": "heads"}),
    "cp2 ring": (2, {"cp": 2, "context": "ring"}),
}


def plan_of(model: str, num_ranks: int, asked: dict[str, Any]) -> Plan:
    request = PlanRequest(**{"global_batch": GLOBAL_BATCH, "precision": "fp64", **asked})
    return try_sharding(plain_plan(request, graph_of(model), num_ranks, "tests"), resolve(model))


def figures(program: Program, batch: Batch, num_steps: int = 3) -> list[float]:
    """Loss and gradient norm of each step; a gradient that is not the same shows in the next loss too."""
    found: list[float] = []
    for _ in range(num_steps):
        output = program.step(batch)
        assert output.gradient_norm is not None
        found += [output.loss, output.gradient_norm]
    program.close()
    return found


def run_on_rank(model: str, asked: dict[str, Any], seed: int | None = 7) -> list[float]:
    plan = plan_of(model, this_rank().num_ranks, asked)
    torch.manual_seed(0)
    program = apply(
        resolve(model).build(), plan, optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), max_norm=1e9, sample_seed=seed,
        device=this_rank().device,
    )  # fmt: skip
    torch.manual_seed(this_rank().number)  # what ranks draw of their own must not matter
    batch = resolve(model).example(GLOBAL_BATCH)  # type: ignore[misc]
    return figures(program, batch)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_draws_the_same(pool: Pools, name: str) -> None:
    num_ranks, asked = PLANS[name]
    model = EAGER if "zero3" in name or name == "pp2" else GPT
    (expected,) = pool(1).run(run_on_rank, model, {})
    found = pool(num_ranks).run(run_on_rank, model, asked)[0]
    assert found == pytest.approx(expected, rel=1e-9)


def test_other_seeds_and_no_dropout_are_others(pool: Pools) -> None:
    """So that the test above does not compare what was never drawn."""
    found = [pool(1).run(run_on_rank, GPT, {}, seed)[0] for seed in (7, 8)]
    found.append(pool(1).run(run_on_rank, GPT.replace("0.1", "0.0"), {})[0])
    for number, one in enumerate(found):
        for other in found[number + 1 :]:
            assert one != pytest.approx(other, rel=1e-6)


# -------------------------------------------------------------------- modules of all kinds


class Drawing(nn.Module):
    """One layer whose forward draws as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2 if how == "recurrent" else 0.0)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(getattr(self, f"_{self.how}")(self.first(features)))

    def _noise(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) + torch.empty_like(x).uniform_(-0.1, 0.1)

    def _paths(self, x: Tensor) -> Tensor:
        """Whole samples are dropped, as in stochastic depth."""
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.5)

    def _channels(self, x: Tensor) -> Tensor:
        return F.dropout1d(x.reshape(x.shape[0], 4, 2), 0.5, self.training).reshape(x.shape)

    def _shared(self, x: Tensor) -> Tensor:
        """The same numbers for all samples: their size does not grow with the batch."""
        return x + F.dropout(x.new_ones(1, 8), 0.5, self.training) + x[:, torch.randperm(8)]

    def _samples_second(self, x: Tensor) -> Tensor:
        turned = torch.stack([x, x, x])
        return F.dropout(turned, 0.3, self.training).sum(0)

    def _multihead(self, x: Tensor) -> Tensor:
        rows = x[:, None].expand(-1, 3, -1)
        return self.attention(rows, rows, rows, need_weights=False)[0].sum(1)

    def _gumbel(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x, hard=False)

    def _in_one_dim(self, x: Tensor) -> Tensor:
        return F.dropout(x.reshape(-1, 2), 0.3, self.training).reshape(x.shape)

    def _among_samples(self, x: Tensor) -> Tensor:
        return x + x[torch.randperm(x.shape[0])]

    def _recurrent(self, x: Tensor) -> Tensor:
        return self.recurrent(x[:, None])[0][:, 0]

    def _own_generator(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)

    def _multinomial(self, x: Tensor) -> Tensor:
        return x + torch.multinomial(x.exp(), 8)


def drawing_on_rank(how: str, microbatch: int) -> list[float]:
    ranks = this_rank().num_ranks
    plan = Plan.from_json(
        f'{{"format": 1, "mesh": {{"dp": {ranks}}}, "microbatch": {microbatch}, "num_microbatches": {8 // ranks // microbatch}, '
        f'"global_batch": 8, "precision": "fp64", "stages": [{{"blocks": [], "coordinate": 0}}]}}'
    )
    torch.manual_seed(0)
    module = Drawing(how)
    loss = Objective(loss=lambda output, batch: output.square().mean(), count=DEFAULT.count)
    program = apply(
        module, plan, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), max_norm=1e9, sample_seed=3, objective=loss,
        device=this_rank().device,
    )  # fmt: skip
    batch = {"features": torch.randn(8, 6, generator=torch.Generator().manual_seed(1))}
    return figures(program, batch)


@pytest.mark.parametrize("how", ["noise", "paths", "channels", "shared", "samples_second", "multihead", "gumbel"])
def test_every_kind_of_draw(pool: Pools, how: str) -> None:
    expected = pool(1).run(drawing_on_rank, how, 8)[0]
    assert pool(1).run(drawing_on_rank, how, 1)[0] == pytest.approx(expected, rel=1e-9)
    assert pool(2).run(drawing_on_rank, how, 2)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("in_one_dim", "no dim of it is the samples"),
        ("among_samples", "draws an order of samples"),
        ("recurrent", "module 'recurrent' (LSTM) drops inside its kernel"),
        ("own_generator", "with a generator of its own"),
        ("multinomial", "calls 'multinomial', which cannot be drawn by sample"),
    ],
)
def test_what_cannot_be_drawn_by_sample_is_refused_by_name(pool: Pools, how: str, words: str) -> None:
    with pytest.raises(RankError) as said:
        pool(1).run(drawing_on_rank, how, 4)
    assert words in str(said.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"compile": True}, "compiled code draws by itself"),
        ({"offload": "parameters", "recompute": "full"}, "blocks of streamed parameters"),
    ],
)
def test_plans_that_do_not_draw_by_sample_are_refused(pool: Pools, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(RankError) as said:
        pool(1).run(run_on_rank, GPT, asked)
    assert words in str(said.value)
