"""The parts around the loop: optimizers and what they keep, the learning rate, settings, run folder, metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cases import Case, plan_of, source_of
from pool import RankPool, this_rank
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.request import PlanRequest
from meshwright.runtime.apply import apply
from meshwright.training.boards import TensorBoard
from meshwright.training.folder import RunFolder
from meshwright.training.metrics import Metrics, read_metrics
from meshwright.training.optimizers import FUSED, learning_rate, make_optimizer, recipe_of, set_learning_rate
from meshwright.training.settings import LearningRateSettings, OptimizerSettings, Settings

Pools = Callable[[int], RankPool]

KINDS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {"betas": [0.8, 0.9]},
    "AdamW amsgrad": {"amsgrad": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {},
    "Adadelta": {},
    "ASGD": {},
    "RMSprop": {},
    "RMSprop momentum": {"momentum": 0.9},
    "Rprop": {},
}


def settings_of(kind: str, **changes: Any) -> Settings:
    optimizer = OptimizerSettings(kind=kind.split()[0], options=KINDS.get(kind, {}), **changes)
    return Settings(model="gpt:", optimizer=optimizer, learning_rate=LearningRateSettings(peak=1e-2))


# Optimizers.


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_says_what_an_optimizer_keeps(kind: str) -> None:
    """Tensors the size of a parameter, and scalars beside them, counted after a step."""
    module = nn.Linear(8, 8)
    optimizer = make_optimizer(module, settings_of(kind))
    module(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    kept = [tensor for tensor in optimizer.state[module.weight].values() if torch.is_tensor(tensor)]
    full = sum(tensor.shape == module.weight.shape for tensor in kept)
    recipe = recipe_of(settings_of(kind))
    assert recipe.optimizer_slots == full
    if kind.split()[0] in FUSED:
        scalars = [tensor for tensor in kept if tensor.shape != module.weight.shape]
        assert recipe.optimizer_scalar_bytes == sum(tensor.nbytes for tensor in scalars)


def test_the_recipe_says_whether_gradients_are_clipped() -> None:
    assert recipe_of(settings_of("AdamW")).clips
    assert not recipe_of(settings_of("AdamW", clip_norm="none")).clips


def train_with(kind: str, zero: int) -> list[float]:
    case = Case("odd", zero, precision="fp32")
    source = source_of("odd")  # the user's function is called the first time: before the seed
    torch.manual_seed(1)
    module = source.build()
    settings = settings_of(kind)
    program = apply(module, plan_of(case), optimizer=make_optimizer(module, settings), device=this_rank().device)
    make = source.example
    assert make is not None
    return [program.step(make(8)).loss for _ in range(4)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Rprop"])
def test_every_optimizer_trains_replicated_and_sharded(pool: Pools, kind: str) -> None:
    """`optimizer.kind` is any class of torch.optim, under every ZeRO stage. (torch's DTensor cannot run Rprop.)"""
    replicated, _ = pool(2).run(train_with, kind, 0)
    sharded, _ = pool(2).run(train_with, kind, 3)
    assert sharded == pytest.approx(replicated, rel=1e-5)
    assert len(set(replicated)) == 4


def test_matrices_decay_and_vectors_do_not() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    module[2].weight.requires_grad_(False)
    matrices, vectors = make_optimizer(module, settings_of("AdamW", weight_decay=0.3)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert [id(p) for p in matrices["params"]] == [id(module[0].weight)]
    assert {id(p) for p in vectors["params"]} == {id(p) for p in module.parameters() if p.dim() == 1}
    (one,) = make_optimizer(module, settings_of("AdamW", decay_vectors=True)).param_groups
    assert len(one["params"]) == 5


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"kind": "AdmaW"}, "optimizer.kind: torch.optim has no 'AdmaW' that trains here: did you mean 'AdamW'?"),
        ({"kind": "LBFGS"}, "optimizer.kind: torch.optim has no 'LBFGS' that trains here"),
        ({"options": {"beta": 1}}, "optimizer.options.beta: AdamW has no such option: did you mean 'betas'?"),
    ],
)
def test_wrong_optimizers(optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        make_optimizer(nn.Linear(2, 2), Settings(model="gpt:", optimizer=OptimizerSettings(**optimizer)))
    assert said in str(caught.value)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="the model has no trainable parameter: nothing to train"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), settings_of("AdamW"))


# The learning rate.


def rates(**fields: Any) -> list[float]:
    settings = LearningRateSettings(peak=1.0, **fields)
    return [learning_rate(step, 11, settings) for step in range(11)]


def test_the_learning_rate_by_hand() -> None:
    assert rates(schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, *[1.0] * 8]
    linear = [1.0, 0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.37, 0.28, 0.19, 0.1]
    assert rates(schedule="linear", warmup_steps=0) == pytest.approx(linear)
    cosine = rates(schedule="cosine", warmup_steps=2, final_share=0.2)
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine[6] == pytest.approx(0.6)
    assert cosine[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warmup_longer_than_the_run(schedule: str) -> None:
    assert rates(schedule=schedule, warmup_steps=100) == pytest.approx([(step + 1) / 100 for step in range(11)])


def test_the_rate_reaches_every_group() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), settings_of("AdamW"))
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


# Settings, run folder, metrics.


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(
        settings_of("SGD momentum", clip_norm=0.5), plan=PlanRequest(zero=3, recompute="every:2"), max_seconds=12.5,
        memory_bytes=2**30,
    )  # fmt: skip
    assert Settings.load(settings.save(tmp_path / "settings.toml")) == settings


def test_no_clipping_survives_its_file(tmp_path: Path) -> None:
    """TOML has no null: a run without clipping must not come back with it."""
    settings = settings_of("AdamW", clip_norm="none")
    assert Settings.load(settings.save(tmp_path / "settings.toml")) == settings


def test_a_run_is_moved_aside(tmp_path: Path) -> None:
    for expected in (None, tmp_path / "run.1", tmp_path / "run.2"):
        folder = RunFolder(tmp_path / "run")
        assert folder.start_fresh() == expected
        folder.settings.write_text(f"# {expected}")
    assert (tmp_path / "run.1/settings.toml").read_text() == "# None"
    assert (tmp_path / "run/checkpoints").is_dir()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).start_fresh() is None


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"run folder {tmp_path}/file/run cannot be made: Not a directory"):
        RunFolder(tmp_path / "file" / "run").start_fresh()


def test_metrics_go_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """Lines past the checkpoint, and a line that a crash tore, are dropped."""
    folder = RunFolder(tmp_path)
    first = Metrics(folder, 0)
    for step in range(5):
        first.write(step, {"loss": float(step), "gradient_norm": None})
    first.close()
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    second = Metrics(folder, 3)
    second.write(3, {"loss": 30.0})
    second.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(folder.metrics)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_metrics_reach_tensorboard(tmp_path: Path) -> None:
    metrics = Metrics(RunFolder(tmp_path), 0, [TensorBoard(RunFolder(tmp_path), 0)])
    metrics.write(0, {"loss": 1.5})
    metrics.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "loss": 1.5}
