"""`meshwright launch --slurm`: the file for sbatch, and what it does when a scheduler runs it.

No SLURM is here: `tests/assets/scheduler` holds stand-ins for sbatch, srun and scontrol, which run the real file on this machine,
with a torchrun of its own for every host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import ASSETS
from command import Cli, losses

from meshwright.core.errors import InputError
from meshwright.core.run.trace import Trace
from meshwright.runtime.slurm import SlurmJob, batch_script
from meshwright.training.folder import RunFolder
from meshwright.training.settings import Settings

SCHEDULER = ASSETS / "scheduler"
PATIENCE_SECONDS = 400.0
Write = Callable[..., Path]


def job(**changes: Any) -> SlurmJob:
    base: dict[str, Any] = {
        "name": "demo", "run": Path("/data/runs/demo"), "num_hosts": 2, "ranks_per_host": 8, "can_resume": True,
        "arguments": ("train", "/data/a file.toml"),
    }  # fmt: skip
    return SlurmJob(**{**base, **changes})


def is_bash(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


def test_the_file_says_what_was_asked_and_is_valid_bash() -> None:
    script = batch_script(job(gpus_per_host=8, options=(("partition", "gpu"), ("time", "12:00:00")), interface="ib0"))
    directives = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"nodes=2", "gpus-per-node=8", "partition=gpu", "time=12:00:00", "requeue"} <= set(directives)
    assert "-m meshwright train '/data/a file.toml'" in script
    assert "export GLOO_SOCKET_IFNAME=ib0" in script
    assert is_bash(script)
    assert not is_bash(script + "if")


def test_words_with_blanks_and_quotes_stay_one_word() -> None:
    odd = """it's a "run" of $HOME; ls"""
    script = batch_script(job(arguments=("train", odd), run=Path("/data/my runs")))
    assert is_bash(script)
    line = next(line for line in script.splitlines() if "-m meshwright train" in line)
    words = line.strip().removeprefix("-m meshwright train ").partition(" ${resume")[0]
    said = subprocess.run(["bash", "-c", f"printf %s {words}"], capture_output=True, text=True)
    assert said.stdout == odd
    assert '#SBATCH --output="/data/my runs/launch/slurm-%j.log"' in script


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((("nodes", "3"),), "--sbatch nodes=3: the script sets --nodes itself"),
        ((("time", "soon"),), "--time soon: give minutes, HH:MM:SS or DAYS-HH"),
        ((("qos; ls", "high"),), "give an option of sbatch as NAME=VALUE"),
        ((("qos", "a\n#SBATCH --nodes=9"),), "give an option of sbatch as NAME=VALUE"),
    ],
)
def test_options_that_would_break_the_file_are_refused(options: tuple[tuple[str, str], ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        batch_script(job(options=options))


def test_a_verb_that_cannot_resume_is_never_told_to() -> None:
    assert "resumable" in batch_script(job())
    assert "resumable" not in batch_script(job(can_resume=False, arguments=("probe",)))


def test_dry_run_prints_the_file_and_leaves_nothing(here: Cli, settings: Write, tmp_path: Path) -> None:
    ended = here("launch", settings(), "--slurm", "--dry-run", "--hosts", 3, "--", "--zero", 1)
    assert ended.code == 0
    assert ended.out.startswith("#!/bin/bash\n#SBATCH --job-name=run\n#SBATCH --nodes=3\n")
    assert f"-m meshwright train {tmp_path}/run/launch/job-1.toml --zero 1 $" in ended.out
    assert is_bash(ended.out)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "say where: --slurm or --ray"),
        (["--slurm", "--ray"], "say where: --slurm or --ray"),
        (["--ray", "--time", "10"], "--time goes with --slurm: leave it out"),
        (["--slurm", "--address", "auto"], "--address goes with --ray: leave it out"),
        (["--slurm", "--verb", "tain"], "--verb tain: did you mean 'train'?"),
        (["--slurm", "--sbatch", "qos"], "--sbatch qos: give an option of sbatch as NAME=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_contradicts_itself_is_refused(here: Cli, settings: Write, flags: list[str], said: str) -> None:
    ended = here("launch", settings(), *flags)
    assert ended.code == 2
    assert said in ended.err


def test_without_slurm_the_file_is_left_and_named(
    here: Cli, settings: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ended = here("launch", settings(), "--slurm")
    assert ended.code == 2
    assert f"sbatch is not here: submit {tmp_path}/run/launch/job-1.sbatch on a host that has SLURM" in ended.err
    assert (tmp_path / "run/launch/job-1.sbatch").exists()
    again = here("launch", settings(steps=9), "--slurm")
    assert "job-2.sbatch" in again.err
    assert Settings.load(tmp_path / "run/launch/job-1.toml").steps == 4


def test_a_folder_of_something_else_is_refused_before_anything_is_submitted(
    here: Cli, settings: Write, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("three years of work")
    ended = here("launch", settings(), "--slurm")
    assert (ended.code, "is not a run folder" in ended.err) == (2, True)


def test_an_earlier_run_is_moved_aside_and_the_files_of_the_launch_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.launch.mkdir(parents=True)
    (folder.launch / "job-1.toml").write_text("")
    assert folder.start_fresh() is None
    folder.settings.write_text("")
    assert folder.start_fresh() == tmp_path / "run.1"
    assert (folder.launch / "job-1.toml").exists()
    assert not folder.settings.exists()


class Scheduler:
    """The stand-in: how jobs it was given went."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def wait(self) -> int:
        """Until a job has ended for good; its exit code."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self.folder / "code").exists():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)
        return int((self.folder / "code").read_text())

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.folder.parent.glob("run/launch/*.log"))


@pytest.fixture
def scheduler(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    folder = tmp_path / "scheduler"
    folder.mkdir()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{SCHEDULER}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_SCHEDULER", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return Scheduler(folder)


@pytest.mark.skipif(shutil.which("bash") is None, reason="the stand-in scheduler needs bash")
def test_a_job_trains_on_two_hosts_of_a_stand_in_scheduler(
    here: Cli, settings: Write, scheduler: Scheduler, tmp_path: Path
) -> None:
    ended = here("launch", settings(nproc=1), "--slurm", "--hosts", 2, "--", "--zero", 1)
    assert ended.code == 0, ended.err
    assert "submitted as job 4711" in ended.out
    assert scheduler.wait() == 0, scheduler.said()
    run = RunFolder(tmp_path / "run")
    assert [step for step, _ in losses(run.path)] == [0, 1, 2, 3]
    assert Trace.load(run.trace).num_ranks == 2
    assert "requeue" not in (scheduler.folder / "calls").read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="the stand-in scheduler needs bash")
def test_a_job_whose_time_is_up_is_queued_again_and_goes_on(
    here: Cli, settings: Write, scheduler: Scheduler, tmp_path: Path
) -> None:
    """Every step is there once: the second start went on where the notice had stopped the first."""
    num_steps = 120
    ended = here("launch", settings(nproc=1, steps=num_steps, data={"validation_every": 0}), "--slurm", "--hosts", 2)
    assert ended.code == 0, ended.err
    metrics = RunFolder(tmp_path / "run").metrics
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not metrics.exists() or not metrics.read_text():
        assert time.monotonic() < deadline, scheduler.said()
        time.sleep(0.02)
    os.kill(scheduler.pid(), signal.SIGUSR1)
    assert scheduler.wait() == 0, scheduler.said()
    calls = (scheduler.folder / "calls").read_text()
    assert calls.count("scontrol requeue 4711") == 1
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(num_steps))
