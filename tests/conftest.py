"""Which rows of the large tables run, a sample or every one; and how long one test may take."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

SAMPLED = {
    "test_capture.py": 3, "test_capture_skipping.py": 2, "test_checkpoint.py": 2, "test_checkpoint_plans.py": 4,
    "test_collectives_and_memory.py": 3, "test_compositions.py": 6, "test_deferred.py": 4, "test_expert_parallel.py": 4,
    "test_habits.py": 6, "test_hybrid.py": 2, "test_parity.py": 4, "test_pipeline.py": 4, "test_selective.py": 4,
    "test_state.py": 4, "test_table.py": 3,
}  # fmt: skip
"""Files with many rows: one in so many runs, always the same ones, and all of them with --every-row (`make test-all`)."""

PATIENCE_SECONDS = 600
"""For one test, its fixtures apart: more than any wait inside a test, so that those speak first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-row", action="store_true", help="run every row of the large tables, not a sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file that is asked for by name runs whole."""
    asked = [Path(str(name).partition("::")[0]).name for name in config.args]
    if config.getoption("--every-row"):
        return
    kept, left, seen = [], [], Counter[tuple[str, str]]()
    for item in items:
        file, function = item.path.name, getattr(item, "originalname", item.name)
        place = seen[file, function]
        seen[file, function] += 1
        is_kept = file in asked or place % SAMPLED.get(file, 1) == 0
        (kept if is_kept else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()  # torch and the tests stay: to look through them whenever a test makes many values takes long


@contextlib.contextmanager
def patience(item: pytest.Item) -> Iterator[None]:
    """Raise in a test that hangs, and print where every thread of it stands.

    One that hangs in native code does not come to raise: `make test` has its process ended some time later.
    """

    def give_up(number: int, frame: FrameType | None) -> NoReturn:
        faulthandler.dump_traceback(sys.__stderr__)
        raise TimeoutError(f"{item.nodeid} took more than {PATIENCE_SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    with patience(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with patience(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    with patience(item):
        yield
