"""`meshwright launch --ray` on a real Ray cluster of this machine: two of its hosts train, and a failure is told in words."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command import Cli, losses

from meshwright.core.errors import InputError
from meshwright.core.run.trace import Trace
from meshwright.runtime.host_ranks import HostRanks, Look
from meshwright.runtime.ray_launch import RayJob, check_answers, check_room, import_ray
from meshwright.training.folder import RunFolder

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'meshwright[ray]'")

LOOK_SECONDS = 0.05


def job(**changes: Any) -> RayJob:
    return RayJob(**{"function": "", "payload": {}, "num_hosts": 2, "ranks_per_host": 4, **changes})


def test_a_cluster_that_can_never_hold_the_job_is_refused() -> None:
    check_room(job(), [{"CPU": 4.0}, {"CPU": 8.0}])
    with pytest.raises(
        InputError,
        match=r"2 hosts with CPU 4 are needed, and the Ray cluster has 1 of them \(its hosts: CPU 2; CPU 8\)",
    ):
        check_room(job(), [{"CPU": 2.0}, {"CPU": 8.0}])
    with pytest.raises(InputError, match="2 hosts with CPU 4, GPU 4 are needed"):
        check_room(job(gpus_per_host=4), [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}])


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named() -> None:
    with pytest.raises(InputError, match=r"Ray is not installed here: pip install 'meshwright\[ray\]'"):
        import_ray()


def test_ranks_of_a_host_are_looked_after_from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they print, how they ended and why; without Ray, the same object that lives in its actor."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    host = HostRanks()
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    host.start(
        "test_ray:speak", {"word": "hello"}, {n: {**shared, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)}
    )
    looks: list[Look] = [host.look()]
    while len(looks[-1].endings) < 2:
        time.sleep(LOOK_SECONDS)  # who looks all the time takes a core from those who start
        looks.append(host.look())
    lines = {line for look in looks for line in look.lines}
    assert {(1, "hello from 0\n"), (1, "hello from 1\n")} <= lines
    endings = looks[-1].endings
    assert (endings[0].exitcode, endings[1].exitcode) == (0, 1)
    assert "on purpose" in endings[1].report


def speak(payload: dict[str, str]) -> None:
    print(f"{payload['word']} from {os.environ['RANK']}")
    if os.environ["RANK"] == "1":
        raise InputError("on purpose")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two hosts of Ray on this machine, each with a raylet of its own."""
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)
    found = started(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}))
    started(lambda: found.add_node(num_cpus=1))
    signal.signal(signal.SIGTERM, before)  # Ray sets one of its own
    yield found
    found.shutdown()


def started(start: Callable[[], Any]) -> Any:
    """Ray gives a host 30 s to come up, which a busy machine may need more than once."""
    for _ in range(2):
        with contextlib.suppress(Exception):
            return start()
    return start()


@needs_ray
def test_two_hosts_of_a_ray_cluster_train_together(
    cluster: Any, cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    ended = cli("launch", settings(nproc=1), "--ray", "--hosts", 2, "--address", cluster.address, "--", "--zero", 1)
    assert ended.code == 0, ended.err
    run = RunFolder(tmp_path / "run")
    assert [step for step, _ in losses(run.path)] == [0, 1, 2, 3]
    assert Trace.load(run.trace).num_ranks == 2
    assert "done; loss" in ended.out


@needs_ray
def test_a_rank_that_fails_on_ray_is_told_in_words(
    cluster: Any, cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    text = (tmp_path / "own.py").write_text(
        "import os, torch\ndef make():\n"
        "    if os.environ.get('RANK') == '1':\n        raise OSError('no such weights today')\n"
        "    return torch.nn.Linear(4, 1), (torch.zeros(8, 4), torch.zeros(8, 1))\n"
    )
    assert text
    ended = cli(
        "launch", settings(nproc=1, model=f"{tmp_path}/own.py:make"), "--ray", "--hosts", 2, "--address", cluster.address
    )  # fmt: skip
    assert ended.code == 2  # the model's file is at fault
    assert "error: rank 1 of 2 failed: " in ended.err
    assert "no such weights today" in ended.err
    assert "Traceback" not in ended.err


def test_a_cluster_that_does_not_answer_is_named() -> None:
    with pytest.raises(InputError, match=r"--address 127.0.0.1:1: no Ray cluster answers there \(Connection refused\)"):
        check_answers("127.0.0.1:1")
    check_answers("auto")
