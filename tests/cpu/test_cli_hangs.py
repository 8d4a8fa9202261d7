"""Ranks that hang, that hold different plans, or that compute what is not finite: named on the command line."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
from cases import ASSETS, MODELS, Case, plan_of
from command import TORCHRUN, Cli

from meshwright.runtime.watchdog import Watchdog

MESHWRIGHT = (*TORCHRUN, "-m", "meshwright")
HANGS = rf"""rank 1 of 2 hangs: others have waited for 4 s
  rank 1 stands at {ASSETS}/models.py:\d+ in forward: time.sleep\(3600\)
  rank 0 waits in (all_reduce|all_gather) over dp, [\d.]+ (B|KiB), at .*\.py:\d+ in \w+: .*
  give more time with --timeout"""


@pytest.mark.parametrize("zero", [3, 0])
def test_a_rank_that_hangs_is_named(cli: Cli, settings: Callable[..., Path], zero: int) -> None:
    """Which rank, on which line, and the collective the other waits in."""
    file = settings(model=f"{ASSETS}/models.py:hangs", plan={"global_batch": 8, "zero": zero})
    ended = cli("train", file, "--timeout", 4)
    assert ended.code == 1
    assert re.search(f"error: {HANGS}", ended.err), ended.err
    assert "Traceback" not in ended.err


def test_a_hang_in_native_code(cli: Cli, settings: Callable[..., Path]) -> None:
    ended = cli("train", settings(model=f"{ASSETS}/models.py:hangs_in_native"), "--timeout", 4)
    assert ended.code == 1
    assert "error: rank 1 of 2 hangs: others have waited for 4 s" in ended.err
    assert "rank 1 does not answer: it is stopped, in native code that holds Python, or cut off" in ended.err
    assert "rank 0 waits in all_reduce over dp" in ended.err


def test_a_hang_under_torchrun_and_in_parity(cli: Cli) -> None:
    model = f"{ASSETS}/models.py:hangs"
    ended = cli("parity", model, "--nproc", 2, "--timeout", 4)
    assert ended.code == 1
    assert re.search(f"error: {HANGS}", ended.err), ended.err
    ended = cli("parity", model, "--timeout", 4, launcher=MESHWRIGHT)
    assert ended.code == 1
    assert re.search(f"error: {HANGS}", ended.err), ended.err
    assert ended.err.count("rank 1 of 2 hangs") == 1


def test_ranks_with_different_plans_under_torchrun(cli: Cli, tmp_path: Path) -> None:
    """One message for all ranks, that names the odd one."""
    for number in range(3):
        plan_of(Case("gpt", zero=2 if number == 2 else 0), 3).save(tmp_path / f"plan{number}.json")
    own = tmp_path / "own.py"
    own.write_text(
        "import os, sys\nfrom meshwright.cli import main\n"
        f"sys.argv = ['meshwright', 'parity', '{MODELS['gpt']}', '--plan', f'plan{{os.environ[\"RANK\"]}}.json']\nmain()\n"
    )
    ended = cli(own, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"))
    assert ended.code == 1
    assert ended.err.count("error: ranks hold different plans: rank 2 differs from the others") == 1, ended.err
    assert ended.err.count("error: ") == 1


def test_a_plan_for_more_ranks_under_torchrun(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    file = settings(model=MODELS["gpt"])
    text = file.read_text().replace("nproc = 2\n", "").partition("[plan]")[0]
    file.write_text(text)
    plan = plan_of(Case("gpt", precision="fp32"), 8).save(tmp_path / "plan.json")
    ended = cli("train", file, "--plan", plan, launcher=MESHWRIGHT)
    assert ended.code == 1
    assert ended.err.count("error: ") == 1, ended.err
    assert re.search(r"8 ranks.*2", ended.err)


def test_the_block_that_made_a_nan_is_named(cli: Cli, settings: Callable[..., Path]) -> None:
    ended = cli("train", settings(model=f"{ASSETS}/models.py:broken"), "--find-nan", "--zero", 2)
    assert ended.code == 1
    assert "at step 1: first in forward of block 'layers.1.down.0' (Breaks), at step 1 on rank 1" in ended.err


def test_who_hangs_is_said_before_what_came_of_it() -> None:
    """A rank that does not answer is killed, and its peer loses it: that error waits until the watchdog has spoken."""
    watchdog, said = Watchdog(0, 2, 5.0, lambda error: None, "attempt"), Event()

    def strike() -> None:
        time.sleep(0.5)
        said.set()

    watchdog.speak_first()
    assert not said.is_set(), "nobody hangs: nothing is waited for"
    watchdog._thread = Thread(target=strike)
    watchdog._strikes.set()
    watchdog._thread.start()
    watchdog.speak_first()
    assert said.is_set()


class Clock:
    """In place of an Event and of the time: a wait takes as long as the next of these."""

    def __init__(self, waits: list[float]) -> None:
        self.now, self.waits = 1000.0, waits

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        if self.waits:
            self.now += self.waits.pop(0)
        return not self.waits

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize(("waits", "is_cut_off"), [([1.0, 30.0, 1.0, 1.0], False), ([1.0] * 12, True)])
def test_who_was_stopped_is_not_cut_off(monkeypatch: pytest.MonkeyPatch, waits: list[float], is_cut_off: bool) -> None:
    """The store was silent while nobody listened; only a store that is silent to who listens cannot be reached."""
    said: list[object] = []
    watchdog, clock = Watchdog(1, 2, 5.0, said.append, "attempt"), Clock(waits)
    monkeypatch.setattr("meshwright.runtime.watchdog.time", clock)
    monkeypatch.setenv("MASTER_ADDR", "here")
    watchdog._ended, watchdog._heard = clock, clock.now  # type: ignore[assignment]
    watchdog._lengthen = lambda: None  # type: ignore[method-assign]
    watchdog._waited_seconds = lambda: 60.0 if clock.now > 1001 else 0.0  # type: ignore[method-assign]
    watchdog._strike = lambda: said.append("strike")  # type: ignore[method-assign]
    watchdog._run()
    assert any("cannot reach the job's store" in str(one) for one in said) == is_cut_off
