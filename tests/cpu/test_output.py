"""A run goes on when nobody can read what it prints any more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.jobs.output import LastingStream


def test_a_pipe_without_a_reader_takes_text() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        lasting = LastingStream(pipe)
        for _ in range(3):
            lasting.write("step\n")
            lasting.flush()
        assert os.readlink(f"/proc/self/fd/{writing}") == os.devnull  # so that closing it does not fail either


def test_text_for_a_full_disk_is_tried_again() -> None:
    with open("/dev/full", "wb", buffering=0) as full, open(full.fileno(), "w", closefd=False) as stream:
        lasting = LastingStream(stream)
        lasting.write("step 1\n")
        lasting.flush()
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"
        with open(os.devnull, "wb") as room:
            os.dup2(room.fileno(), full.fileno())  # the disk has room again
        lasting.flush()


def test_a_process_without_standard_output_prints_nowhere() -> None:
    lasting = LastingStream(None)
    assert lasting.write("step\n") == 5
    lasting.flush()
    assert not lasting.isatty()


@pytest.mark.parametrize("where", ["pipe", "full"])
def test_a_run_that_nobody_reads_ends_as_any_other(
    settings: Callable[..., Path], tmp_path: Path, environment: dict[str, str], where: str
) -> None:
    command = [sys.executable, "-m", "meshwright", "train", str(settings(steps=3))]
    with open("/dev/full", "w") as full:
        stdout = subprocess.PIPE if where == "pipe" else full
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
        if run.stdout is not None:
            run.stdout.close()
        assert run.stderr is not None
        errors = run.stderr.read()
    assert run.wait() == 0, errors
    assert "Traceback" not in errors
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003"]
