"""Files beside a run's checkpoints that are damaged: named, moved aside, and the run goes on from its checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Cli, losses

from meshwright.core.bounds import LONGEST_LINE_BYTES
from meshwright.core.plan import Plan
from meshwright.training.company import good_lines
from meshwright.training.settings import Settings

Damage = Callable[[Path], None]


def bytes_that_are_no_text(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\xff\xfe\x00\n")


def a_number(path: Path) -> None:
    path.write_text(path.read_text() + "5\n")


def a_folder(path: Path) -> None:
    if path.exists():
        path.unlink()
    path.mkdir()


def a_link_to_itself(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


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
    "link": {"metrics.jsonl": a_link_to_itself, "plan.json": a_link_to_itself, "faults.jsonl": a_link_to_itself},
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
        assert damage is Path.unlink or os.path.lexists(folder / f"{name}.damaged"), "nothing is removed"
    assert "Traceback" not in ended.err
    assert losses(folder)[:-2] == ([] if kind in ("folder", "link") else before)
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
def test_lines_that_no_step_leaves(line: bytes, tmp_path: Path) -> None:
    assert good_lines(metrics(tmp_path, GOOD + line + GOOD)) == ([GOOD, GOOD], "line 2 is not what a step leaves")


def test_a_last_line_that_was_cut_off_is_no_damage(tmp_path: Path) -> None:
    assert good_lines(metrics(tmp_path, GOOD + GOOD[:-5])) == ([GOOD], "")
    assert good_lines(metrics(tmp_path, b"")) == ([], "")


def test_a_line_without_end_is_damage_and_not_held_in_memory(tmp_path: Path) -> None:
    good, words = good_lines(metrics(tmp_path, GOOD + bytes(3 * LONGEST_LINE_BYTES)))
    assert good == [GOOD]
    assert "line 2" in words


def metrics(folder: Path, text: bytes) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(text)
    return path
