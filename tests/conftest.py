"""Which rows of the large tables run, a sample or every one; how long a test may take; what all workers share."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
from hypothesis import settings

settings.register_profile("same", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("hunt", deadline=None, max_examples=1000)
settings.load_profile("same")
"""Property tests run the same examples each time: a change fails for what it changed. `--hypothesis-profile hunt` draws others, and
many more (`make hunt`)."""
SAMPLED = {
    "test_activation_offload.py": 5, "test_host_optimizer.py": 5, "test_ring.py": 5, "test_streaming.py": 7,
    "test_best_sharding_runs.py": 5, "test_capture.py": 5, "test_capture_skipping.py": 5, "test_checkpoint.py": 5,
    "test_checkpoint_damage.py": 3, "test_reshard.py": 9, "test_cli_hangs.py": 2, "test_collectives_and_memory.py": 9,
    "test_compositions.py": 9, "test_checkpoint_files.py": 5, "test_checkpoint_async.py": 5, "test_resume_exact.py": 5,
    "test_deferred.py": 5, "test_expert_parallel.py": 9, "test_habits.py": 9, "test_hybrid.py": 4, "test_parity.py": 9,
    "test_pipeline.py": 7, "test_selective.py": 5, "test_state.py": 5, "test_table.py": 9,
    "test_own_backward.py": 7, "test_left_behind.py": 5, "test_strangers.py": 5, "test_export.py": 5, "test_compile.py": 3,
    "test_batch_norm.py": 3, "test_pretrained.py": 3, "test_own_loop.py": 5, "test_close.py": 3, "test_usage.py": 3,
    "test_company.py": 2, "test_labels.py": 3, "test_drawn_layers.py": 3, "test_old_norms.py": 3, "test_sample_draws.py": 3,
    "test_runtime.py": 2, "test_full_disk.py": 2, "test_distributions.py": 2, "test_fp16.py": 2,
    "test_functions_on_parts_give_what_they_give_on_the_whole": 7, "test_own_losses_agree_with_one_process": 3,
    "test_parity_holds": 3, "test_a_module_in_memory_is_checked_at_its_first_batch": 2,
    "test_plain_processes_take_over_where_the_template_is_lost": 2, "test_a_cell_is_at_parity_or_refused": 2,
    "test_every_optimizer_trains_replicated_and_sharded": 3, "test_a_probe_over_two_hosts_sees_the_link_between_them": 2,
}  # fmt: skip
"""Files and functions with many rows: one in so many runs, always the same ones; all of them with --every-row (`make test-all`).

Most tables are products of two, three or four values: a step of 5 or 7 comes by all combinations of them in turn.
"""
LONGEST = (
    "test_faults.py", "test_check.py", "test_joint.py", "test_cli_train.py", "test_two_hosts.py", "test_launch.py",
    "test_full_disk.py", "test_resume_exact.py", "test_split_rules.py", "test_compile.py", "test_cli.py", "test_cli_hangs.py",
    "test_own_loop.py", "test_checkpoint_damage.py", "test_table.py", "test_guard.py", "test_run_folder.py", "test_hosts.py",
    "test_reshard.py", "test_checkpoint.py", "test_distributions.py", "test_ray.py", "test_survey.py", "test_runtime.py",
    "test_own_backward.py", "test_doctor.py", "test_checkpoint_files.py", "test_batch_norm.py", "test_parity.py", "test_fuzz.py",
    "test_best_sharding_runs.py", "test_capture_huggingface.py", "test_collectives_and_memory.py", "test_search.py",
)  # fmt: skip
"""Workers begin with these, so that none is left with a long file when the others are done."""
GRAPHS = "MESHWRIGHT_TEST_GRAPHS"
"""A folder for one run, see cpu/captures.py."""
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before anything loads torch; workers, their ranks and commands inherit it. The cores are shared with other workers
and ranks: threads that wait there for one another after every op take processor time and do nothing (docs/log.md)."""
PATIENCE_SECONDS = 600
"""For one test, its fixtures apart: more than any wait inside a test, so that those speak first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-row", action="store_true", help="run every row of the large tables, not a sample")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a shell's background job: commands under test would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # workers and ranks inherit it: each graph is captured once
        os.environ[GRAPHS] = tempfile.mkdtemp(prefix="meshwright-graphs-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(GRAPHS), ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file that is asked for by name runs whole."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    asked = [Path(str(name).partition("::")[0]).name for name in config.args]
    if config.getoption("--every-row"):
        return
    kept, left, seen = [], [], Counter[tuple[str, str]]()
    for item in items:
        file, function = item.path.name, getattr(item, "originalname", item.name)
        place = seen[file, function]
        seen[file, function] += 1
        is_kept = file in asked or place % SAMPLED.get(function, SAMPLED.get(file, 1)) == 0
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
