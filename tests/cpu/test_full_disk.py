"""Disks that are full, folders that are gone or in the way: what was trained is not lost, and nobody sees a traceback."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cases import ASSETS
from command import Cli, Started, has_saved, losses, wait_for

from meshwright.training.folder import RunFolder
from meshwright.training.metrics import Metrics, read_metrics

STEPS = 30
RUN: dict[str, Any] = {"model": f"{ASSETS}/faulty.py:told", "steps": STEPS, "checkpoint": {"every": 5}}
WAITS = "the run has ended, and waits for a disk that takes its last checkpoint"


def said(run: Started) -> str:
    """What a forked command has printed so far."""
    return "".join(file.read_text() for file in run.process._files)  # type: ignore[union-attr]


def num_lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, of 4 MiB."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Until it takes no byte more."""
    file = disk / "fill"
    handle = os.open(file, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(handle, bytes(1 << 16)):
            pass
    os.close(handle)
    return file


def put_in_the_way(folder: Path) -> Path:
    """The checkpoints are moved off, and a file has their name: nothing can be written there. Returns where they are."""
    away = folder.with_name("away")
    (folder / "checkpoints").rename(away)
    (folder / "checkpoints").write_text("in the way")
    return away


def put_back(folder: Path, away: Path) -> None:
    (folder / "checkpoints").unlink()
    away.rename(folder / "checkpoints")


def test_a_run_that_has_ended_waits_for_room(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "run"
        file = settings(**RUN, out=str(folder))
        run = start("train", file)
        wait_for(lambda: has_saved(folder), run)
        full = fill(disk)
        wait_for(lambda: WAITS in said(run), run)
        refused = cli("train", file, "--resume", "--steps", STEPS + 5)
        assert refused.code == 2
        assert "is in use" in refused.err
        full.unlink()
        ended = run.end()
        assert ended.code == 0, ended.err
        assert [step for step, _ in losses(folder)] == list(range(STEPS)), "lines wait for room too"
        assert (folder / f"checkpoints/step-{STEPS:08d}/manifest.json").exists()
        fill(disk)
        before = (folder / "metrics.jsonl").read_text()
        for arguments in (("--resume",), ("--out", disk / "other")):
            refused = cli("train", file, "--steps", STEPS + 5, *arguments)
            assert refused.code == 2
            assert "No space left on device: make room" in refused.err.replace("\n", " ")
            assert "Traceback" not in refused.err
        assert (folder / "metrics.jsonl").read_text() == before


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_run(
    cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        file = settings(model="gpt:layers=2,hidden=128,heads=2,seq=16,vocab=512", out=str(disk / "run"))
        ended = cli("train", file)
        assert ended.code == 2, ended.err
        assert "error: a checkpoint of this run needs 7.06 MiB" in ended.err.replace("\n", " ")
        assert "has 4.00 MiB free: make room" in ended.err.replace("\n", " ")
        assert not (disk / "run").exists()


def test_what_is_in_the_way_is_waited_for_and_ctrl_c_ends_the_wait(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    for is_put_back in (True, False):
        folder = tmp_path / str(is_put_back)
        run = start("train", settings(**RUN, out=str(folder)))
        wait_for(lambda folder=folder: has_saved(folder), run)
        away = put_in_the_way(folder)
        wait_for(lambda run=run: WAITS in said(run), run)
        if is_put_back:
            put_back(folder, away)
        else:
            run.process.send_signal(signal.SIGINT)
        ended = run.end()
        assert ended.code == (0 if is_put_back else 130), ended.err
        assert "Traceback" not in ended.err
        assert ended.out.count(WAITS) == 1
    assert [step for step, _ in losses(tmp_path / "True")] == list(range(STEPS))
    assert (tmp_path / f"True/checkpoints/step-{STEPS:08d}/manifest.json").exists()
    put_back(folder, away)
    assert cli("train", "--resume", folder).code == 0, "from the newest that was written"
    assert [step for step, _ in losses(folder)] == list(range(STEPS))


def test_the_second_place_of_the_settings(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    folder, second = tmp_path / "run", tmp_path / "second"
    checkpoint = {"every": 5, "elsewhere": str(second)}
    run = start("train", settings(**{**RUN, "checkpoint": checkpoint}))
    wait_for(lambda: has_saved(folder), run)
    away = put_in_the_way(folder)
    ended = run.end()
    assert ended.code == 0, ended.err
    (place,) = second.iterdir()
    newest = place / f"step-{STEPS:08d}"
    assert f"It is in {newest} instead" in ended.out.replace("\n", "")
    assert len(list(place.iterdir())) == 2, "as many are kept there as at home"
    put_back(folder, away)
    resumed = cli("train", settings(**{**RUN, "steps": STEPS + 5}), "--resume")
    assert resumed.code == 0, resumed.err
    assert [step for step, _ in losses(folder)] == list(range(STEPS + 5))
    assert (folder / f"checkpoints/step-{STEPS + 5:08d}").exists()


def test_a_checkpoint_that_failed_is_tried_again_soon(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    """After 1, 2, 4 … further steps, not only when the next one is due."""
    folder = tmp_path / "run"
    run = start("train", settings(**{**RUN, "steps": 5000, "checkpoint": {"every": 100}}))
    wait_for(lambda: num_lines(folder) >= 2, run)
    away = put_in_the_way(folder)
    for step in (100, 101, 103):
        wait_for(lambda step=step: f"checkpoint of step {step} could not be written" in said(run), run)
    put_back(folder, away)
    wait_for(lambda: has_saved(folder), run)
    run.process.send_signal(signal.SIGINT)
    assert run.end().code == 130


def test_a_folder_that_is_removed_is_made_anew(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = start("train", settings(**RUN))
    wait_for(lambda: has_saved(folder), run)
    shutil.rmtree(folder)
    ended = run.end()
    assert ended.code == 0, ended.err
    resumed = cli("train", "--resume", folder, "--steps", STEPS + 2)
    assert resumed.code == 0, resumed.err
    assert (folder / f"checkpoints/step-{STEPS + 2:08d}").exists()


def test_ctrl_c_on_a_step_with_a_validation_keeps_it(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    """Every step has one here."""
    data = {"source": f"{ASSETS}/faulty.py:pair", "validation_every": 1, "validation_batches": 1}
    file = settings(**{**RUN, "steps": 5000, "data": data})
    run = start("train", file)
    wait_for(lambda: num_lines(tmp_path / "run") >= 8, run)
    run.process.send_signal(signal.SIGINT)
    assert run.end().code == 130
    done = len(losses(tmp_path / "run"))
    assert cli("train", file, "--resume", "--steps", done + 2).code == 0
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if "validation_loss" in line] == list(range(done + 2))


def test_a_temporary_folder_without_room_costs_the_samples_and_not_the_run(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path, environment: dict[str, str]
) -> None:
    """What a recorded step leaves there is hundreds of KiB."""
    with small_disk(tmp_path / "disk") as disk:
        full = fill(disk)
        os.truncate(full, full.stat().st_size - (64 << 10))
        environment["TMPDIR"] = str(disk)
        try:
            ended = start("train", settings(**RUN)).end()
        finally:
            del environment["TMPDIR"]
        assert ended.code == 0, ended.err
        assert "not sampled" in ended.out
        assert ended.err == ""


def test_lines_follow_their_path(tmp_path: Path) -> None:
    """The folder is moved away and back, then removed and made anew: every line is where it is looked for."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    metrics = Metrics(RunFolder(folder), 0)
    metrics.write(0, {"loss": 0.0})
    folder.rename(away)
    metrics.write(1, {"loss": 1.0})
    away.rename(folder)
    metrics.write(2, {"loss": 2.0})
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
    shutil.rmtree(folder)
    metrics.write(3, {"loss": 3.0})
    folder.mkdir()
    metrics.write(4, {"loss": 4.0})
    assert metrics.close()
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [3, 4]


# Files that may not grow: the system's own limit, which needs no rights.


@contextmanager
def no_growth_beyond(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_wait_for_room(tmp_path: Path) -> None:
    metrics = Metrics(RunFolder(tmp_path), 0)
    with no_growth_beyond(100):
        for step in range(20):
            metrics.write(step, {"loss": float(step)})
    metrics.write(20, {"loss": 20.0})
    assert metrics.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(21))
    with no_growth_beyond(0):
        again = Metrics(RunFolder(tmp_path), 12)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 12
        again.write(12, {"loss": 1.0})
        assert not again.close(), "the last line is lost, without an error"
