"""Losses that are not good, and replicas that are not alike: what a run does about them, the same on all ranks."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ASSETS, Case, graph_of, plan_of, source_of
from command import losses
from pool import RankError, RankPool, this_rank
from rich.console import Console

from meshwright.core.errors import CorruptionError, RunError
from meshwright.core.request import PlanRequest
from meshwright.rules.plain_plan import plain_plan
from meshwright.runtime.apply import apply
from meshwright.runtime.clip import local
from meshwright.runtime.program import Program
from meshwright.runtime.replicas import Replicas, checksum
from meshwright.training.checkpoint import latest
from meshwright.training.folder import RunFolder
from meshwright.training.guard import LEAST_HISTORY, MOST_ROLLBACKS, MOST_SKIPS, Guard
from meshwright.training.job import Job
from meshwright.training.metrics import read_metrics
from meshwright.training.run import run
from meshwright.training.settings import (
    CheckpointSettings,
    DataSettings,
    FaultSettings,
    LearningRateSettings,
    OptimizerSettings,
    Settings,
)

Pools = Callable[[int], RankPool]
BAD_STEP = 30
STEPS = 36


def train(folder: Path, data: str, faults: dict[str, Any], zero: int = 0) -> str:
    """A run of `assets/faulty.py` on this rank; what it said."""
    model = f"{ASSETS}/faulty.py:linear"
    plan = plain_plan(PlanRequest(global_batch=8, zero=zero), graph_of(model), 2, "tests")  # type: ignore[arg-type]
    settings = Settings(
        model=model,
        steps=STEPS,
        tensorboard=False,
        faults=FaultSettings(**faults),
        checkpoint=CheckpointSettings(every=8),
        data=DataSettings(source=f"{ASSETS}/faulty.py:{data}", shuffle=False),
        optimizer=OptimizerSettings(kind="SGD", weight_decay=0.0),
        learning_rate=LearningRateSettings(peak=0.01, warmup_steps=0),
    )
    run_folder = RunFolder(folder)
    run_folder.checkpoints.mkdir(parents=True, exist_ok=True)
    said = io.StringIO()
    run(Job(settings, plan, run_folder), this_rank(), None, Console(file=said, width=400))
    return said.getvalue()


@pytest.mark.parametrize("data", ["with_nan", "with_spike"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_bad_update_is_left_out(pool: Pools, tmp_path: Path, data: str, zero: int) -> None:
    """All steps before are those of a run on good data; the parameters stay what they were, so that later losses are finite."""
    said, _ = pool(2).run(train, tmp_path / "run", data, {"on_nan": "skip", "on_spike": "skip"}, zero)
    pool(2).run(train, tmp_path / "good", "good", {}, zero)
    found, expected = dict(losses(tmp_path / "run")), dict(losses(tmp_path / "good"))
    assert set(range(STEPS)) - set(found) == {BAD_STEP}
    assert all(found[step] == expected[step] for step in range(BAD_STEP))
    assert all(math.isfinite(loss) and loss < 10 for loss in found.values())
    assert f"step {BAD_STEP}: the loss is" in said
    assert "its update is left out" in said
    (line,) = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line.get("left_out")]
    assert line["step"] == BAD_STEP


@pytest.mark.parametrize("data", ["with_nan", "with_spike"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_rolls_back_and_goes_on_behind_the_data(pool: Pools, tmp_path: Path, data: str, zero: int) -> None:
    """Back to step 24, and on with what follows the bad batch and the one after it, in whose step it is noticed."""
    said, _ = pool(2).run(train, tmp_path / "run", data, {"on_nan": "rollback", "on_spike": "rollback"}, zero)
    found = dict(losses(tmp_path / "run"))
    assert sorted(found) == list(range(STEPS))
    assert all(math.isfinite(loss) and loss < 10 for loss in found.values())
    assert f"step {BAD_STEP}: the loss is" in said
    assert "rolled back to the checkpoint of step 24; samples 192 to 255 of the stream" in said
    pool(2).run(train, tmp_path / "good", "good", {}, zero)
    expected = dict(losses(tmp_path / "good"))
    assert all(found[step] == expected[step] for step in range(24))
    assert found[24] != expected[24], "the data was not left out"
    newest = latest(tmp_path / "run/checkpoints")
    assert newest is not None
    assert newest.name == f"step-{STEPS:08d}"


@pytest.mark.parametrize(("data", "faults"), [("with_nan", {}), ("with_spike", {"on_spike": "stop"})])
def test_a_run_stops(pool: Pools, tmp_path: Path, data: str, faults: dict[str, Any]) -> None:
    with pytest.raises(RankError) as caught:
        pool(2).run(train, tmp_path / "run", data, faults)
    assert set(caught.value.errors) == {0, 1}
    assert all(f"at step {BAD_STEP}: lower learning_rate.peak" in text for text in caught.value.errors.values())
    newest = latest(tmp_path / "run/checkpoints")
    assert newest is not None
    assert newest.name == "step-00000024"


def test_a_spike_is_ignored_unless_asked_for(pool: Pools, tmp_path: Path) -> None:
    pool(2).run(train, tmp_path / "run", "with_spike", {})
    assert len(losses(tmp_path / "run")) == STEPS


# The judge alone.


def test_what_a_spike_is() -> None:
    guard = Guard(FaultSettings(on_spike="stop", spike=2.0))
    for number in range(LEAST_HISTORY - 1):
        guard.accept(1.0 + number / 100)
        assert guard.trouble(1e9) is None, "too early to tell"
    guard.accept(1.1)
    assert guard.trouble(2.0) is None
    found = guard.trouble(2.4)
    assert found is not None
    assert found.answer == "stop"
    negative = Guard(FaultSettings(on_spike="skip", spike=2.0))
    for _ in range(LEAST_HISTORY):
        negative.accept(-5.0)
    assert negative.may_learn(-0.1)
    assert not negative.may_learn(0.1)


def test_patience_ends() -> None:
    guard = Guard(FaultSettings(on_nan="skip"))
    for step in range(MOST_SKIPS):
        guard.note_skip(step, "the loss is nan")
    with pytest.raises(RunError, match=f"the loss is nan at step 99, and {MOST_SKIPS} updates before it were left out"):
        guard.note_skip(99, "the loss is nan")
    guard.accept(1.0)
    guard.note_skip(100, "the loss is nan")
    for _ in range(MOST_ROLLBACKS):
        guard.note_rollback(24, "bad")
    with pytest.raises(RunError, match=r"rolled back 3 times to the checkpoint of step 24"):
        guard.note_rollback(24, "bad")


# Replicas.


def flip_a_bit(program: Program, name: str) -> None:
    """The lowest bit of one element: nobody sees it in a loss."""
    tensor = local(program.replicated()[name]).detach()
    kind = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(kind).flatten()[tensor.numel() // 2] ^= 1


def flipped(case: Case, odd_rank: int, spread: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Two checks that find nothing, a flipped bit on one rank, and what the third check says."""
    rank = this_rank()
    source = source_of(case.model)
    plan = plan_of(case)
    if spread:
        from meshwright.planner.shardings import with_legal_sharding

        request = PlanRequest(global_batch=8, precision="fp64", **spread)  # type: ignore[arg-type]
        from cases import MODELS

        plan = with_legal_sharding(
            plain_plan(request, graph_of(case.model), rank.num_ranks, "tests"), MODELS[case.model]
        )
    torch.manual_seed(rank.number)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    program = apply(source.build(), plan, optimizer=optimizer, objective=source.objective, device=rank.device)
    replicas = Replicas(program)
    assert source.example is not None
    replicas.check(0)
    for _ in range(3):
        program.step(source.example(plan.global_batch))
    replicas.check(3)
    name = next(name for names in replicas.shared.values() for name in names) if replicas.shared else ""
    if rank.number == odd_rank and name:
        flip_a_bit(program, name)
    try:
        replicas.check(4)
    except CorruptionError as error:
        return str(error), error.fault.ranks if error.fault is not None else ()
    return "", ()


def test_two_ranks_are_both_named(pool: Pools) -> None:
    """There is no majority."""
    for said, ranks in pool(2).run(flipped, Case("odd"), 1, {}):
        assert ranks == (0, 1)
        assert "after step 4 ranks 0, 1 of 2 differ from each other" in said
        assert "in 'scale', which must be the same bit by bit" in said


def test_the_odd_rank_is_named(pool: Pools) -> None:
    for said, ranks in pool(4).run(flipped, Case("odd", samples=2), 2, {}):
        assert ranks == (2,)
        assert "after step 4 rank 2 of 4 differs from the others in 'scale'" in said


@pytest.mark.parametrize("spread", [{"tp": 2}, {"pp": 2}, {"zero": 1, "hybrid": 2}], ids=str)
def test_replicas_beside_other_axes(pool: Pools, spread: dict[str, int]) -> None:
    """All four ranks learn of it, those of the other dp group too."""
    for said, ranks in pool(4).run(flipped, Case("gpt", samples=2), 3, spread):
        assert 3 in ranks
        assert len(ranks) == 2
        assert "differ from each other" in said


@pytest.mark.parametrize(
    "spread",
    [
        {"offload": "optimizer", "zero": 0},
        {"offload": "parameters", "zero": 3, "recompute": "full"},
    ],
    ids=str,
)
def test_replicas_on_the_host(pool: Pools, spread: dict[str, Any]) -> None:
    """Masters, and of streamed blocks what no rank has alone: three checks, the last of which finds the bit."""
    for said, ranks in pool(2).run(flipped, Case("gpt", samples=4), 1, spread):
        assert ranks == (0, 1)
        assert "differ from each other" in said


@pytest.mark.parametrize("zero", [1, 3])
def test_shards_are_left_alone(pool: Pools, zero: int) -> None:
    assert pool(2).run(flipped, Case("odd", zero), 1, {}) == [("", ())] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 5).to(dtype).t()
    before = int(checksum(tensor))
    raw = torch.view_as_real(tensor) if dtype.is_complex else tensor
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()]
    flat = raw.view(kind)
    place = (2, 3, 1) if dtype.is_complex else (2, 3)
    for bit in range(8 * raw.element_size()):
        mask = torch.tensor(1, dtype=kind) << bit
        flat[place] ^= mask
        assert int(checksum(tensor)) != before, bit
        flat[place] ^= mask
    assert int(checksum(tensor)) == before
