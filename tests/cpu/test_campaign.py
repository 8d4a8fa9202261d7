"""The judge of the fault campaign sees what a run must not leave: other digits, lines twice, files, damaged checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from campaign.damage import WAYS
from campaign.fault import ProblemError
from campaign.judge import check_whole, expected_of, left_files, wrong_figures, wrong_state
from campaign.kinds import KINDS, SCATTERING, UPON_FEWER, Deck
from campaign.plans import PLANS, STEPS
from campaign.scene import Scene
from safetensors.torch import save

from meshwright.core.files.disk import write_file
from meshwright.training.manifest import Manifest
from meshwright.training.position import Progress


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Of a run that seems to have ended: lines and two checkpoints."""
    made = Scene("test", PLANS[0], tmp_path / "scene", has_disk=False, timeout_seconds=4.0)
    for step in (STEPS - 5, STEPS):
        write_checkpoint(made.out / f"checkpoints/step-{step:08d}", step)
    write_lines(made, [{"step": step, "loss": step / 3} for step in range(STEPS)])
    return made


def write_checkpoint(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    progress = Progress(step=step, cursor=0, plan="", graph="", num_ranks=1, num_steps=STEPS, next_loss=1.0)
    small = {name: name.encode() * 9 for name in ("contents.json", "plan.json", "settings.toml")}
    tensors = save({"model.weight": torch.full((8,), step)})
    contents = {"rank-00000.safetensors": tensors, "progress.json": progress.to_json().encode(), **small}
    files = {name: write_file(folder / name, [content]) for name, content in contents.items()}
    write_file(folder / "manifest.json", [Manifest(files=files).to_json().encode()])


def write_lines(scene: Scene, lines: list[dict[str, float]]) -> None:
    (scene.out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_same_run_is_right(scene: Scene) -> None:
    expected = expected_of(scene)
    assert (wrong_figures(scene, expected), wrong_state(scene, expected), left_files(scene)) == ([], "", [])


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:7], {"step": 7, "loss": lines[7]["loss"] * (1 + 1e-15)}, *lines[8:]],
        lambda lines: [*lines[:7], *lines[8:]],
        lambda lines: [*lines[:8], *lines[7:]],
        lambda lines: [*lines[:8], {"step": 7, "validation_loss": 1.0}, *lines[8:]],
    ],
)
def test_figures_that_differ(scene: Scene, change: Callable[[list[dict[str, float]]], list[dict[str, float]]]) -> None:
    """A digit, a line that is missing, one that is there twice, a validation too many."""
    expected = expected_of(scene)
    write_lines(scene, change(scene.lines()))
    (wrong,) = wrong_figures(scene, expected)
    assert wrong.startswith("step 7: ")


@pytest.mark.parametrize(
    "file",
    [
        "disk/run/run.lock",
        "disk/run/checkpoints/.step-00000040.draft",
        "disk/run/live/.a.json.1.draft",
        "tmp/meshwright-x",
    ],
)
def test_files_that_are_left(scene: Scene, file: str) -> None:
    path = scene.folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert left_files(scene) == [file]


@pytest.mark.parametrize("way", [way for way in WAYS if way.in_checkpoint], ids=lambda way: way.name)
def test_every_damage_is_one(scene: Scene, way: object) -> None:
    """A checkpoint without a manifest is none: then the one before it is the newest."""
    expected = expected_of(scene)
    assert wrong_state(scene, expected) == ""
    way.do(scene.out / f"checkpoints/step-{STEPS:08d}" / way.file)  # type: ignore[attr-defined]
    if way.words:  # type: ignore[attr-defined]
        with pytest.raises(ProblemError, match="not whole"):
            check_whole(scene.out)
    else:
        assert "step-00000035" in wrong_state(scene, expected)


def test_every_plan_gets_every_kind() -> None:
    for plan in PLANS:
        deck = Deck(plan, KINDS, random.Random(1))
        dealt = [deck.deal(5) for _ in range(9)]
        assert {kind for kinds in dealt for kind in kinds} == set(UPON_FEWER if plan.fewer else KINDS)
        assert all(kind not in SCATTERING for kinds in dealt for kind in kinds[:-1])
