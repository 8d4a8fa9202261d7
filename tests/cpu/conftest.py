"""Fixtures of the CPU tests: pools of ranks, and a watch for what a test leaves behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
from command import _ranks_are_forked, cli, environment, here, settings, start, template
from matrix import matrix_lines, recorded
from pool import RankPool

__all__ = [
    "_ranks_are_forked",
    "cli",
    "environment",
    "here",
    "leaves_nothing_behind",
    "pool",
    "settings",
    "start",
    "template",
]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What test_reshard.py has found, as a table."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if getattr(report, "when", "") == "call"
    ]
    for line in matrix_lines(recorded(reports, "reshard"), recorded(reports, "reshard_chain")):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """`pool(2)`: the pool of two ranks, the same for all tests."""
    pools: dict[int, RankPool] = {}

    def of(num_ranks: int) -> RankPool:
        return pools.setdefault(num_ranks, RankPool(num_ranks))

    yield of
    for made in pools.values():
        made.close()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A test must not change the environment, join a process group, or leave threads running."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    assert changed <= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}, (
        f"the test changed the environment: {sorted(changed)}"
    )
    begun = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    for thread in begun:
        thread.join(timeout=5)  # transformers does not wait for those that read its weights, which are ending
    left = [thread.name for thread in begun if thread.is_alive()]
    assert not left, f"the test left threads running: {left}"
    import torch.distributed as dist

    assert not dist.is_initialized(), "the test left a process group behind"
