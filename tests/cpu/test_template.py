"""Forked ranks: what they find is what a new process would, and how they end is told as for one."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Started, wait_for

from meshwright.core.errors import RunError
from meshwright.runtime.template import STOPPING, Template, may_fork, template_at_hand, template_of


def tell() -> None:
    """Runs in the forked process: writes what it finds."""
    import numpy

    found = {
        "parent": os.getppid(),
        "session": os.getsid(0),
        "process": os.getpid(),
        "folder": os.getcwd(),
        "path": sys.path[0],
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "main": sys.modules["__main__"].__name__,
        "name": Path("/proc/self/comm").read_text().strip(),
        "draw": float(numpy.random.rand()),
        "threads": threading.active_count(),
        "stops": [signal.getsignal(number) is not signal.SIG_IGN for number in STOPPING],
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


def fails() -> None:
    raise ArithmeticError("the gears slipped")


def exits() -> None:
    sys.exit(7)


def waits() -> None:
    time.sleep(600)


def code_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def told(template: Template, folder: Path, name: str, environment: dict[str, str]) -> dict[str, Any]:
    file = folder / name
    assert code_of(template.start(f"{__name__}:tell", [str(file), "more"], environment, name)) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_forked_process_is_like_a_new_one(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (told(template, tmp_path, f"mw-rank-{n}", {"RANK": str(n), "HOME": "/"}) for n in range(2))
    assert first["environment"] == {"RANK": "0", "HOME": "/"}
    assert second["environment"]["RANK"] == "1"
    assert (first["folder"], first["path"]) == (str(tmp_path), str(tmp_path))
    assert first["parent"] == os.getpid()
    assert first["session"] == first["process"]
    assert first["arguments"] == [str(tmp_path / "mw-rank-0"), "more"]
    assert (first["main"], first["name"]) == (__name__, "mw-rank-0")
    assert first["draw"] != second["draw"]
    assert first["threads"] == 1
    assert first["stops"] == [signal.getsignal(number) is not signal.SIG_IGN for number in STOPPING], "as this process"


def test_descriptors_do_not_pile_up(template: Template, tmp_path: Path) -> None:
    """What one process was given is not left to the next."""
    numbers = [told(template, tmp_path, str(number), {})["descriptors"] for number in range(3)]
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.parametrize(("function", "code"), [("fails", 1), ("exits", 7)])
def test_how_it_ended(template: Template, function: str, code: int) -> None:
    assert code_of(template.start(f"{__name__}:{function}", [], os.environ)) == code


def test_a_process_that_is_killed_is_told_as_such(template: Template) -> None:
    process = template.start(f"{__name__}:waits", [], os.environ)
    os.killpg(process, signal.SIGKILL)
    assert code_of(process) == -signal.SIGKILL


def test_it_heeds_a_signal_from_its_first_moment(template: Template) -> None:
    """The template ignores these; who was just started does not."""
    process = template.start(f"{__name__}:waits", [], os.environ)
    os.killpg(process, signal.SIGTERM)
    assert code_of(process) == -signal.SIGTERM


def test_a_template_that_is_gone_is_said(template: Template) -> None:
    from forked import command_template

    with command_template() as other:
        process = int(other.start(f"{__name__}:tell", ["/dev/null"], os.environ))
        assert code_of(process) == 0
    with pytest.raises((RunError, OSError)):
        other.start(f"{__name__}:tell", ["/dev/null"], os.environ)
    with pytest.raises(RunError, match="no rank could be forked"):
        template.start("no_such_module:main", [], os.environ)


def test_no_template_where_threads_run() -> None:
    """Ranks are plain processes then."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert not may_fork()
        with template_of(["no_such_module"]):
            assert template_at_hand() is None
    finally:
        ended.set()
        thread.join()


def test_a_rank_that_does_not_end_is_ended_by_the_second_signal(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    """The first asks for a checkpoint; a rank that is stopped does not hear it."""
    run = start("train", settings(steps=5000, timeout=0.0))
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, run)
    ranks = run.ranks()
    assert set(ranks) == {0, 1}
    os.kill(ranks[1], signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 130
    assert not any(Path(f"/proc/{process}").exists() for process in ranks.values())
