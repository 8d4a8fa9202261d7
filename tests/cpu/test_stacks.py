"""Stacks of another process that runs no Python: also of one that ends as soon as it goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.runtime.stacks import stacks_of

STOPPED = """
import os, signal
from meshwright.runtime.stacks import answer_signals

def where_it_stands():
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)

print(answer_signals(), flush=True)
where_it_stands()
"""
SECONDS = 30.0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="stacks of others are read through /proc")
def test_a_stopped_process_that_ends_at_once_is_still_read() -> None:
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    number = int(process.stdout.readline())
    deadline = time.monotonic() + SECONDS
    while state_of(process.pid) != "T":
        assert time.monotonic() < deadline, "it did not stop"
        time.sleep(0.01)
    found = stacks_of(process.pid, number)
    assert process.wait(SECONDS) == 0
    assert "where_it_stands" in found
    assert found.count("<module>") == 1, "the last line is there too"


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(SECONDS)
    assert stacks_of(process.pid, 3) == ""


def state_of(process: int) -> str:
    return Path("/proc", str(process), "stat").read_text().rpartition(") ")[2].split()[0]
