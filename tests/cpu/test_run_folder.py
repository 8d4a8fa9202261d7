"""A run folder belongs to one run at a time, whoever else comes by, and to no other run's checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import ASSETS
from command import Cli, Started, has_saved, losses, wait_for
from injection import alive

from meshwright.runtime.process import Process, process_of
from meshwright.training.folder import RunFolder
from meshwright.training.lock import Holder

RUN = {"model": f"{ASSETS}/faulty.py:told", "checkpoint": {"every": 5}}


def num_lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_second_run_is_refused_and_the_first_goes_on(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    file, folder = settings(**RUN, steps=5000), tmp_path / "run"
    run = start("train", file)
    wait_for(lambda: num_lines(folder) >= 6 and has_saved(folder), run)
    for arguments in (("train", file), ("train", file, "--resume"), ("train", "--resume", folder)):
        second = cli(*arguments)
        assert second.code == 2, second.err
        assert f"error: {folder} is in use: process {run.process.pid} on host" in second.err.replace("\n", " ")
    run.process.send_signal(signal.SIGINT)
    ended = run.end()
    assert ended.code == 130, ended.err
    done = [step for step, _ in losses(folder)]
    assert done == list(range(len(done)))
    assert (folder / f"checkpoints/step-{len(done):08d}").exists()
    assert not (tmp_path / "run.1").exists()
    assert not (folder / "run.lock").exists()
    assert cli("train", file, "--steps", 2).code == 0
    assert (tmp_path / "run.1/trace.json").exists()


def test_checkpoints_of_another_run_are_refused(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    """As after somebody has put two runs into one folder."""
    file, folder = settings(), tmp_path / "run"
    for steps, out in ((4, folder), (2, tmp_path / "other")):
        assert cli("train", file, "--steps", steps, "--out", out).code == 0
    shutil.copytree(folder / "checkpoints/step-00000004", tmp_path / "other/checkpoints/step-00000004")
    first, other = (json.loads((one / "run.json").read_text())["id"] for one in (folder, tmp_path / "other"))
    ended = cli("train", file, "--steps", 6, "--out", tmp_path / "other", "--resume")
    assert ended.code == 2, ended.err
    assert f"step-00000004 is of another run ({first}, not {other})" in ended.err.replace("\n", " ")
    progress = json.loads((tmp_path / "other/checkpoints/step-00000002/progress.json").read_text())
    assert progress["run"] == other
    (tmp_path / "other/run.json").unlink()
    ended = cli("train", file, "--steps", 6, "--out", tmp_path / "other", "--resume")
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "other/run.json").read_text())["id"] == first, "it goes on as the run it now is"


def test_what_a_killed_launcher_left_goes_at_the_next_start(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = start("train", settings(**RUN, steps=5000))
    wait_for(lambda: has_saved(folder), run)
    ranks = run.ranks()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate()
    while any(map(alive, ranks.values())):
        os.sched_yield()
    assert owned_by(run.process.pid)
    for left in (".step-00000001.draft", ".step-00000002.gone", "step-00000003"):
        (folder / "checkpoints" / left).mkdir()
    (folder / "live/.rank-00000.json.1.draft").write_text("")
    (folder / ".plan.json.1.draft").write_text("")
    done = int(max(path.name for path in (folder / "checkpoints").glob("step-*")).removeprefix("step-"))
    resumed = cli("train", "--resume", folder, "--steps", done + 2)
    assert resumed.code == 0, resumed.err
    assert not owned_by(run.process.pid)
    assert not [path for path in folder.rglob(".*") if path.is_file()]
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_what_is_left_of_a_run_that_has_ended_goes_when_it_is_shown_again(
    cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    """Its launcher was killed after the last checkpoint: nothing is left to do but to clear."""
    file, folder = settings(steps=2), tmp_path / "run"
    assert cli("train", file).code == 0
    killed = subprocess.Popen(["sleep", "600"])
    process = process_of(killed.pid)
    (folder / "run.lock").write_text(Holder(process=process, token="of-before", since="").to_json())
    temporary = Path(tempfile.mkdtemp(prefix="meshwright-"))
    (temporary / "owner.json").write_text(process.to_json())
    (folder / "checkpoints/.step-00000002.draft").mkdir()
    killed.kill()
    killed.wait()
    again = cli("train", "--resume", folder)
    assert (again.code, "has all its 2 steps already" in again.out) == (0, True), again.err
    assert not (folder / "run.lock").exists()
    assert not (folder / "checkpoints/.step-00000002.draft").exists()
    assert not temporary.exists()


@pytest.mark.parametrize("file", ["metrics.jsonl", "estimate.json", "plan.json"])
def test_a_run_that_has_ended_is_shown_again_without_a_file(
    cli: Cli, settings: Callable[..., Path], tmp_path: Path, file: str
) -> None:
    assert cli("train", settings(steps=2)).code == 0
    (tmp_path / "run" / file).unlink()
    again = cli("train", "--resume", tmp_path / "run")
    assert again.code == 0, again.err
    assert "Traceback" not in again.err


def owned_by(process: int) -> list[Path]:
    """Temporary folders of a process."""
    owners = Path(tempfile.gettempdir()).glob("meshwright-*/owner.json")
    return [file.parent for file in owners if Process.load(file).number == process]


def test_a_folder_whose_settings_were_removed_is_a_run_still(tmp_path: Path) -> None:
    """It is moved aside whole, and nothing of it is taken for the new run's."""
    folder = RunFolder(tmp_path / "run")
    folder.start_fresh()
    (folder.checkpoints / "step-00000005").mkdir()
    assert not folder.settings.exists()
    moved = folder.start_fresh()
    assert moved is not None
    assert [one.name for one in (moved / "checkpoints").iterdir()] == ["step-00000005"]
    assert not list(folder.checkpoints.iterdir())
