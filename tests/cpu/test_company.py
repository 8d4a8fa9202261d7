"""Files beside a run's checkpoints that are damaged: named, moved aside, and the run goes on from its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Cli, losses

from meshwright.core.plan import Plan
from meshwright.train.company import good_lines
from meshwright.train.settings import Settings

Damage = Callable[[Path], None]


def bytes_that_are_no_text(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\xff\xfe\x00\n")


def a_number(path: Path) -> None:
    path.write_text(path.read_text() + "5\n")


def a_folder(path: Path) -> None:
    if path.exists():
        path.unlink()
    path.mkdir()


def a_file(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("")


DAMAGES: dict[str, dict[str, Damage]] = {
    "bytes": {
        "metrics.jsonl": bytes_that_are_no_text, "settings.toml": bytes_that_are_no_text, "live": a_file,
        "trace.json": a_number,
    },
    "number": {"metrics.jsonl": a_number, "plan.json": a_folder, "run.json": bytes_that_are_no_text, "faults.jsonl": a_folder},
    "folder": {
        "metrics.jsonl": a_folder, "settings.toml": Path.unlink, "plan.json": Path.unlink, "cluster.json": a_number,
        "estimate.json": a_folder, "traces": a_file, "run.json": a_folder,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_goes_on_beside_damaged_files(cli: Cli, settings: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    assert cli("train", settings()).code == 0
    before, plan = losses(folder), Plan.load(folder / "plan.json")
    for name, damage in DAMAGES[kind].items():
        damage(folder / name)
    ended = cli("train", "--resume", folder, "--steps", 6)
    assert ended.code == 0, ended.err
    said = ended.out.replace("\n", "")
    for name, damage in DAMAGES[kind].items():
        assert f"warning: {folder / name} is damaged: " in said
        assert damage is Path.unlink or (folder / f"{name}.damaged").exists(), "nothing is removed"
    assert "Traceback" not in ended.err
    assert losses(folder)[:-2] == ([] if kind == "folder" else before)
    assert [step for step, _ in losses(folder)[-2:]] == [4, 5]
    assert Settings.load(folder / "settings.toml").steps == 6
    assert Plan.load(folder / "plan.json") == plan
    again = cli("train", "--resume", folder, "--steps", 7)
    assert again.code == 0, again.err
    assert "damaged" not in again.out


GOOD = b'{"step": 1, "loss": NaN, "left_out": true}\n'


@pytest.mark.parametrize(
    "line", [b"5\n", b"\xff\n", b"{}\n", b'{"step": "1"}\n', b'{"step": 1, "loss": "x"}\n', b"[" * 100_000 + b"\n", b"\n"]
)  # fmt: skip
def test_lines_that_no_step_leaves(line: bytes) -> None:
    assert good_lines(GOOD + line + GOOD) == ([GOOD, GOOD], "line 2 is not what a step leaves")


def test_a_last_line_that_was_cut_off_is_no_damage() -> None:
    assert good_lines(GOOD + GOOD[:-5]) == ([GOOD], "")
    assert good_lines(b"") == ([], "")
