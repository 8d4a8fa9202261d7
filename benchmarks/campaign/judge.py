"""What a run has to be in the end: digit by digit the one that nothing happened to, and nothing beside it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from campaign.fault import ProblemError
from campaign.plans import STEPS
from campaign.scene import Scene
from meshwright.core.errors import CheckpointError, InputError
from meshwright.training.kept import all_of, step_of
from meshwright.training.manifest import check_files, read_manifest
from meshwright.training.position import read_progress

FIGURES = ("loss", "validation_loss", "gradient_norm", "learning_rate")
"""Compared; times and speeds are of the moment."""
Figures = dict[tuple[int, str], float]


@dataclass(frozen=True)
class Expected:
    """Of a run that was left alone."""

    figures: Figures
    state: dict[str, str]
    """Tensor of the last checkpoint → the checksums of its parts, whichever of several ranks with the same part wrote it."""
    next_loss: float | None


def expected_of(scene: Scene) -> Expected:
    return Expected(figures_of(scene.lines()), _state(scene.out), _next_loss(scene.out))


def figures_of(lines: list[dict[str, Any]]) -> Figures:
    """A step that is written twice is told from one that is written once."""
    found: Figures = {}
    for line in lines:
        for name in FIGURES:
            if name in line:
                again = "" if (line["step"], name) not in found else " again"
                found[line["step"], name + again] = line[name]
    return found


def wrong_figures(scene: Scene, expected: Expected) -> list[str]:
    """What differs from the run that was left alone."""
    found = figures_of(scene.lines())
    if scene.plan.fewer:
        wanted = dict.fromkeys(expected.figures, 0.0)
        found = dict.fromkeys(found, 0.0)
    else:
        wanted = expected.figures
    if scene.is_scattered:
        away = figures_of(scene.lines(scene.disk / "away"))
        found = {**away, **found}
    if scene.is_scattered or scene.lacks_lines:
        wanted = {key: value for key, value in wanted.items() if key in found}
    return [
        f"step {step}: {name} is {found.get((step, name))}, not {wanted.get((step, name))}"
        for step, name in sorted(wanted.keys() | found.keys())
        if found.get((step, name)) != wanted.get((step, name))
    ]


def wrong_state(scene: Scene, expected: Expected) -> str:
    """Of the last checkpoint."""
    newest = all_of(scene.out / "checkpoints")
    if not newest or step_of(newest[-1]) != STEPS:
        return f"its newest checkpoint is {newest[-1].name if newest else 'none'}, not that of step {STEPS}"
    check_whole(scene.out)
    if scene.plan.fewer:
        return ""
    if _next_loss(scene.out) != expected.next_loss:
        return f"the loss that comes next is {_next_loss(scene.out)}, not {expected.next_loss}"
    found = _state(scene.out)
    differing = sorted(
        name for name in found.keys() | expected.state.keys() if found.get(name) != expected.state.get(name)
    )
    return f"its last checkpoint differs in {', '.join(differing)}" if differing else ""


def check_whole(out: Path) -> None:
    """Every checkpoint that would be taken for one is one."""
    for path in all_of(out / "checkpoints"):
        try:
            manifest = read_manifest(path)
            check_files(path, manifest, manifest.files)
            read_progress(path)
        except (CheckpointError, InputError) as error:
            raise ProblemError(f"a checkpoint is not whole: {error}") from error


def left_files(scene: Scene) -> list[str]:
    """Temporary files, drafts and locks, when no command runs. What was damaged and set aside, or moved by us, is no such file."""
    hidden = [path for path in scene.out.rglob("*") if path.name.startswith(".") or path.name == "run.lock"]
    drafts = list(scene.out.rglob("*.draft"))
    state = scene.state_folder()
    others = [*scene.tmp.iterdir(), *(state.iterdir() if state.exists() else ())]
    beside = [path for path in scene.disk.iterdir() if path.name not in ("run", "away") and not _is_ours(path)]
    return sorted({str(path.relative_to(scene.folder)) for path in (*hidden, *drafts, *others, *beside)})


def _is_ours(path: Path) -> bool:
    """What a damage moved; and the folder of a start before its first checkpoint, which the next start moves aside."""
    return path.name.startswith(("linked-", "run."))


def _state(out: Path) -> dict[str, str]:
    newest = all_of(out / "checkpoints")[-1]
    found: dict[str, set[str]] = {}
    for name in (name for name in read_manifest(newest).files if name.endswith(".safetensors")):
        with safe_open(newest / name, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in list(file.keys())}
        for key, tensor in tensors.items():
            found.setdefault(key, set()).add(sha256(_bytes(tensor)).hexdigest())
    return {key: " ".join(sorted(checksums)) for key, checksums in found.items()}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _next_loss(out: Path) -> float | None:
    return read_progress(all_of(out / "checkpoints")[-1]).next_loss
