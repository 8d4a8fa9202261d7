"""Ranks that divide one model see the same samples and start from the same numbers, or the run is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import graph_of, source_of
from pool import RankError, RankPool, this_rank
from torch import nn

import meshwright as mw
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.measure.checking.small_plan import try_sharding
from meshwright.models.objective import call
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.same_samples import checksum

Pools = Callable[[int], RankPool]
SAMPLES = 4


def plan_of(**asked: int) -> Plan:
    request = PlanRequest(global_batch=SAMPLES, microbatch=SAMPLES // asked.get("dp", 1), precision="fp32", **asked)
    return try_sharding(plain_plan(request, graph_of("gpt"), 2, "tests"), source_of("gpt"))


def train(plan: Plan, how: str, from_batch: int) -> list[float]:
    """Batches that differ between ranks, the first few of them left out."""
    torch.manual_seed(0)
    source = source_of("gpt")
    module = source.build()
    assert source.example is not None
    losses = []
    if how == "apply":
        program = mw.apply(module, plan, optimizer=torch.optim.SGD, check=False)
    else:
        module, optimizer = mw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), plan, check=False)
    for number in range(4):
        batch = source.example(SAMPLES)
        if number >= from_batch:
            batch = {name: tensor.roll(this_rank().number, dims=1) for name, tensor in batch.items()}
        if how == "apply":
            losses.append(program.step(batch).loss)
        else:
            loss = nn.functional.cross_entropy(call(module, batch).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("how", "axis"), [("apply", "tp"), ("apply", "pp"), ("apply", "cp"), ("wrap", "tp")])
@pytest.mark.parametrize("from_batch", [0, 2])
def test_different_samples_on_ranks_of_one_model_are_refused(pool: Pools, how: str, axis: str, from_batch: int) -> None:
    with pytest.raises(RankError) as caught:
        pool(2).run(train, plan_of(**{axis: 2}), how, from_batch)
    assert len(caught.value.errors) == 2
    said = next(iter(caught.value.errors.values()))
    assert f"different samples in batch {1 if from_batch == 0 else 4}" in said
    assert axis in said


def test_replicas_see_samples_of_their_own(pool: Pools) -> None:
    assert all(pool(2).run(train, plan_of(dp=2), "apply", 0))


# ---------------------------------------------------------------- what users' functions draw

DRAWING = """
import random, torch
def make():
    ids = torch.randint(0, 64, (4, 8)) + random.randint(0, 9)
    return torch.nn.Linear(8, 1), {"x": ids.float(), "labels": torch.rand(4, 1)}
"""


def drawn(file: str) -> int:
    torch.seed()
    example = resolve(f"{file}:make").example
    assert example is not None
    return checksum(example(8))


def test_a_batch_that_a_function_draws_is_the_same_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(DRAWING)
    one, other = pool(2).run(drawn, str(file))
    assert one == other


def test_drawing_leaves_the_callers_numbers_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(DRAWING)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    resolve(f"{file}:make")
    assert torch.equal(torch.rand(2), expected)


# ---------------------------------------------------------------- numbers that are no parameters


class Fourier(nn.Module):
    """Frequencies that are drawn, and kept as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.frequencies = torch.randn(16)
        self._more = [torch.randn(16, 1).expand(16, 16).contiguous()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(torch.sin(x * self.frequencies) @ self._more[0])))


def step_of_drawn() -> tuple[float, Any]:
    torch.manual_seed(this_rank().number)
    module = nn.Sequential(Fourier(), Fourier())
    batch = (torch.ones(SAMPLES, 16) / 3, torch.zeros(SAMPLES, 16))
    graph = mw.capture(module, batch, loss=distance)
    plan = mw.plain_plan(PlanRequest(tp=2, global_batch=SAMPLES, microbatch=SAMPLES), graph, 2, "tests")
    program = mw.apply(module, plan, optimizer=torch.optim.SGD, loss=distance, check=False)
    return program.step(batch).loss, program.module[1].frequencies.tolist()  # type: ignore[union-attr, operator]


def distance(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def test_plain_tensors_are_the_first_ranks(pool: Pools) -> None:
    one, other = pool(2).run(step_of_drawn)
    assert one == other
    torch.manual_seed(0)
    module = nn.Sequential(Fourier(), Fourier())
    assert one[1] == module[1].frequencies.tolist()
    assert one[0] == pytest.approx(distance(module(torch.ones(SAMPLES, 16) / 3), (0, torch.zeros(SAMPLES, 16))).item())
