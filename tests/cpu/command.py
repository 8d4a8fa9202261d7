"""`meshwright` as people start it: in processes of their own, or, where no rank is started, inside the test's.

A process of its own is forked from one that has loaded torch, or, where the start itself is tested (`FRESH`), a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import ASSETS, hand_cluster
from forked import ForkedCommand, command_template
from injection import ranks_of

from meshwright.runtime.template import Template, _at_hand
from meshwright.training.metrics import read_metrics

PATIENCE_SECONDS = 500.0
"""For one wait: beside two busy loops on two cores, a run on a Ray cluster of two hosts took more than 180 s."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output."""
        (line,) = self.out.splitlines()
        return json.loads(line)


class Started:
    """A `meshwright` process and its ranks, all in sessions of their own, so that none outlives a test."""

    def __init__(self, process: ForkedCommand | subprocess.Popen[str]) -> None:
        self.process = process

    def end(self) -> Ended:
        try:
            out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            pytest.fail(f"did not end within {PATIENCE_SECONDS:.0f} s:\n{out}\n{err}")
        assert self.process.returncode is not None
        return Ended(self.process.returncode, out, err)

    def kill(self) -> None:
        for pid in [*self.ranks().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ranks(self) -> dict[int, int]:
        """Rank → process id of the children that are ranks."""
        return ranks_of(self.process.pid)


Cli = Callable[..., Ended]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The machine is measured once for all tests."""
    cache = tmp_path_factory.mktemp("cache")
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """What commands are forked from."""
    with command_template() as made:
        yield made


@pytest.fixture
def _ranks_are_forked(template: Template) -> Iterator[None]:
    """Ranks that the test's own process starts come from what has loaded torch, as those of a command do."""
    before = _at_hand.set(template)
    yield
    _at_hand.reset(before)


@pytest.fixture
def start(
    environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Started]]:
    """Start `meshwright ARGUMENTS` in an empty folder. launcher: what stands before the arguments.

    `-m MODULE` and `-c CODE` are forked from a process that has loaded torch; fresh=True starts a new Python.
    """
    running: list[Started] = []

    def begin(*arguments: object, launcher: tuple[str, ...] = ("-m", "meshwright"), fresh: bool = False) -> Started:
        words = [*launcher, *map(str, arguments)]
        process: ForkedCommand | subprocess.Popen[str]
        if fresh or words[0] not in ("-m", "-c"):
            process = subprocess.Popen(
                [sys.executable, *words], cwd=tmp_path, env=environment, text=True, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        else:
            command = words[1:] if words[0] == "-m" else words
            process = ForkedCommand(request.getfixturevalue("template"), command, environment, tmp_path)
        running.append(Started(process))
        return running[-1]

    yield begin
    for one in running:
        if one.process.poll() is None:
            one.kill()
            one.process.communicate()


@pytest.fixture
def cli(start: Callable[..., Started]) -> Cli:
    return lambda *arguments, **options: start(*arguments, **options).end()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str]) -> Cli:
    """Run a verb inside this process: quicker, for verbs that end before any rank is started."""
    from meshwright.cli import main

    def run(*arguments: object) -> Ended:
        monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
        monkeypatch.setattr(sys, "argv", ["meshwright", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        return Ended(int(code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Path]:
    """A settings file for a tiny model on a cluster that need not be measured; `plan={...}` and others put over it."""

    def write(**changes: Any) -> Path:
        cluster = hand_cluster(2).save(tmp_path / "cluster.json")
        base: dict[str, Any] = {
            "model": f"{ASSETS}/models.py:odd", "cluster": str(cluster), "nproc": 2, "steps": 4, "tensorboard": False,
            "plan": {"global_batch": 8}, "out": str(tmp_path / "run"),
        }  # fmt: skip
        path = tmp_path / "settings.toml"
        import tomli_w

        path.write_text(tomli_w.dumps({**base, **changes}))
        return path

    return write


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def has_saved(folder: Path) -> bool:
    """Whether a run has a checkpoint. Which one, nobody can wait for: on a busy machine it may be pruned before anyone looks."""
    return any((folder / "checkpoints").glob("step-*"))


def wait_for(condition: Callable[[], bool], run: Started) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if run.process.poll() is not None:
            pytest.fail(f"ended too early: {run.end()}")
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
