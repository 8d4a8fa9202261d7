"""Weights & Biases: off unless asked for, refused early where it is missing, and told every figure where it is there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from command import Cli

from meshwright.core.errors import InputError
from meshwright.core.estimate import MemoryParts, TimeParts
from meshwright.runtime.watch import Sample
from meshwright.training.boards import WeightsAndBiases, check_boards, open_boards
from meshwright.training.folder import RunFolder
from meshwright.training.metrics import Metrics, read_metrics
from meshwright.training.settings import Settings

SETTINGS = Settings(model="mlp", name="study", tensorboard=False)
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed: pip install wandb"
)


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert open_boards(SETTINGS, RunFolder(tmp_path), 0) == []


@pytest.mark.parametrize("asked", ["on", "offline"])
def test_where_it_is_missing_the_run_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf'wandb = "{asked}", but .* is not installed: pip install wandb'):
        check_boards(msgspec.structs.replace(SETTINGS, wandb=asked))


@needs_wandb
def test_offline_it_keeps_every_figure_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    apart(tmp_path, monkeypatch)
    folder = RunFolder(tmp_path / "run-7")
    folder.start_fresh()
    board = WeightsAndBiases(msgspec.structs.replace(SETTINGS, wandb="offline"), folder)
    metrics = Metrics(folder, 3, [board])
    metrics.write(3, {"loss": 2.5, "gradient_norm": None})
    metrics.show_sample(3, sample(activations=77))
    metrics.write(4, {"loss": 2.25})
    metrics.close()
    wandb.teardown()
    losses, peaks = told(folder, "loss"), told(folder, "peak_bytes/activations")
    assert losses == [2.5, 2.25]
    assert peaks == [77]
    assert told(folder, "gradient_norm") == []
    assert (board.run.group, board.run.name, board.run.config["model"]) == ("study", "run-7", "mlp")


@needs_wandb
def test_a_run_of_two_ranks_is_told_once(
    cli: Cli, settings: Callable[..., Path], tmp_path: Path, environment: dict[str, str]
) -> None:
    environment |= {"WANDB_CONFIG_DIR": str(tmp_path / "config"), "WANDB_CACHE_DIR": str(tmp_path / "cache")}
    ended = cli("train", settings(wandb="offline"))
    assert ended.code == 0, ended.err
    folder = RunFolder(tmp_path / "run")
    assert told(folder, "loss") == [line["loss"] for line in read_metrics(folder.metrics)]
    assert len(told(folder, "loss")) == 4


def apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to, nor read from, the home of whoever runs the tests."""
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(folder / name))


def sample(**memory: int) -> Sample:
    return Sample(time_seconds=TimeParts(), memory_bytes=MemoryParts(**memory), collectives=())


def told(folder: RunFolder, name: str) -> list[float]:
    """The values of a figure in the one offline run of a folder, each once: its file has names and values as text."""
    (file,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    found = re.findall(re.escape(name.encode()) + rb"\x82\x01.([-+.e\d]+)", file.read_bytes(), re.DOTALL)
    return list(dict.fromkeys(float(text) for text in found))
