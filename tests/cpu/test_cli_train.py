"""`meshwright train` in processes of its own: what it writes, and how it ends when it is interrupted or a rank dies."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import ASSETS, ROOT
from command import TORCHRUN, Cli, Started, has_saved, losses, wait_for

from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.plan import Plan
from meshwright.core.run.trace import Trace
from meshwright.training.settings import Settings

TRAIN_KEYS = {
    "loss",
    "step_seconds",
    "tokens_per_second",
    "predicted_step_seconds",
    "predicted_peak_bytes",
    "measured_peak_bytes",
}
NUM_STEPS = 4
RUN_FILES = {"settings.toml", "plan.json", "estimate.json", "trace.json", "metrics.jsonl", "checkpoints"}


def test_train_the_example(cli: Cli, tmp_path: Path) -> None:
    """The first command of the README, in a new process, from an empty cache: probe, search, train, compare."""
    ended = cli("train", ROOT / "examples/gpt-small.toml", "--nproc", 2, "--steps", NUM_STEPS, "--json", fresh=True)
    assert ended.code == 0, ended.err
    assert ended.json.keys() >= TRAIN_KEYS
    folder = tmp_path / "runs/gpt-small"
    assert {path.name for path in folder.iterdir()} >= RUN_FILES | {"tensorboard"}
    check_run_folder(folder, ended.json)
    assert "predicted against measured" in ended.err
    assert " candidates" in ended.err


def check_run_folder(folder: Path, said: dict[str, Any]) -> None:
    """Every file can be read as the value it is, and agrees with what was printed."""
    settings = Settings.load(folder / "settings.toml")
    assert (settings.steps, settings.nproc) == (NUM_STEPS, 2) or settings.nproc is None
    plan, trace = Plan.load(folder / "plan.json"), Trace.load(folder / "trace.json")
    estimate = Estimate.load(folder / "estimate.json")
    assert (plan.world, plan.global_batch) == (2, 16)
    assert trace.plan == plan.hash
    assert (trace.num_steps, trace.num_ranks, len(trace.steps)) == (NUM_STEPS, 2, NUM_STEPS)
    assert [step for step, _ in losses(folder)] == list(range(NUM_STEPS))
    assert said["loss"] == losses(folder)[-1][1] == trace.steps[-1].loss
    assert said["measured_peak_bytes"] == trace.peak_bytes
    assert said["step_seconds"] == trace.step_seconds
    assert said["predicted_step_seconds"] == estimate.step_seconds
    assert said["predicted_peak_bytes"] == estimate.peak_bytes
    assert trace.collectives == estimate.collectives
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{NUM_STEPS:08d}"]


def test_train_under_torchrun(cli: Cli, tmp_path: Path) -> None:
    """Its ranks measure the machine themselves: here few sizes, since the figures do not matter."""
    launcher = (*TORCHRUN, str(ASSETS / "quick_probe.py"))
    ended = cli("train", ROOT / "examples/gpt-small.toml", "--steps", NUM_STEPS, "--json", launcher=launcher)
    assert ended.code == 0, ended.err
    assert ended.json.keys() >= TRAIN_KEYS
    check_run_folder(tmp_path / "runs/gpt-small", ended.json)


def test_a_finished_run(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    """Every effective setting is written down; to resume it changes nothing, and above all loses nothing."""
    file = settings(optimizer={"kind": "Adam", "options": {"betas": [0.8, 0.9]}}, plan={"global_batch": 8, "zero": 2})
    first = cli("train", file, "--seed", 7, "--steps", 3)
    assert first.code == 0, first.err
    written = tomllib.loads((tmp_path / "run/settings.toml").read_text())
    assert (written["seed"], written["steps"], written["plan"]["zero"]) == (7, 3, 2)
    assert written["optimizer"]["options"] == {"betas": [0.8, 0.9]}
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1, 2]
    trace, metrics = (tmp_path / "run" / name for name in ("trace.json", "metrics.jsonl"))
    before = (Trace.load(trace), metrics.read_text())
    resumed = cli("train", tmp_path / "run/settings.toml", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert (Trace.load(trace), metrics.read_text()) == before
    assert resumed.json["loss"] == losses(tmp_path / "run")[-1][1]


def test_probe_is_cached(cli: Cli, environment: dict[str, str], tmp_path: Path) -> None:
    """Measured once, then read: the second call says nothing about measuring and gives the same cluster."""
    first = cli("probe", "--nproc", 2, "--json", "-o", "cluster.toml")
    assert first.code == 0, first.err
    again = cli("probe", "--nproc", 2, "--json")
    assert "measuring this machine" not in again.err
    assert again.json == first.json
    assert list(Path(environment["XDG_CACHE_HOME"], "meshwright").glob("cluster-*.json"))
    cluster = Cluster.load(tmp_path / "cluster.toml")
    assert (cluster.origin, cluster.num_devices, cluster.device.kind) == ("probe", 2, "cpu")


# Interruption and death.


SLOW = {"model": f"{ASSETS}/models.py:slow", "steps": 14}


def test_ctrl_c_leaves_a_checkpoint_and_resume_goes_on(
    start: Callable[..., Started], cli: Cli, settings: Callable[..., Path], tmp_path: Path
) -> None:
    """SIGINT to the parent alone. The resumed run gives the losses of one that was never interrupted."""
    file = settings(**SLOW)
    whole = cli("train", file, "--json", "--out", "whole")
    assert whole.code == 0, whole.err
    run = start("train", file, "--json")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, run)
    run.process.send_signal(signal.SIGINT)
    ended = run.end()
    assert ended.code == 130, ended.err
    assert (ended.json["stopped"], ended.json["run_folder"]) == ("interrupted", str(tmp_path / "run"))
    done = ended.json["num_steps"]
    assert 3 <= done < 14
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{done:08d}"]
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(done))
    resumed = cli("train", file, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["num_steps"] == 14
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_run(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    """As a terminal sends it, or a job system: to the parent and to every rank at once."""
    run = start("train", settings(**SLOW, plan={"global_batch": 8, "zero": 3}), "--json")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, run)
    for pid in (run.process.pid, *run.ranks().values()):
        os.kill(pid, number)
    ended = run.end()
    assert ended.code == 130, ended.err
    assert ended.json["stopped"] == "interrupted"
    assert Path(ended.json["checkpoint"]).joinpath("progress.json").exists()
    assert "Traceback" not in ended.err


def test_a_rank_that_is_killed_is_named(
    start: Callable[..., Started], settings: Callable[..., Path], tmp_path: Path
) -> None:
    run = start("train", settings(**SLOW, checkpoint={"every": 1}))
    wait_for(lambda: has_saved(tmp_path / "run"), run)
    ranks = run.ranks()
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    ended = run.end()
    assert ended.code == 1
    assert f"error: rank 1 of 2 was killed from outside (SIGKILL, process {ranks[1]})" in ended.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), "a rank outlived the run"
    assert "Traceback" not in ended.err.partition("error: ")[2]


def test_a_rank_that_raises_is_named(cli: Cli, settings: Callable[..., Path]) -> None:
    """The rank that failed first and its own error, not the others' broken connections."""
    ended = cli("train", settings(model=f"{ASSETS}/models.py:fails_late"))
    assert ended.code == 1
    said = ended.err.partition("error: ")[2]
    assert said.startswith("rank 1 of 2 failed: ArithmeticError: the gears slipped")
    assert "models.py" in said, "the user's own line is missing"


def test_a_loss_that_is_not_finite_ends_the_run(cli: Cli, settings: Callable[..., Path], tmp_path: Path) -> None:
    rate = {"peak": 1e30, "schedule": "constant", "warmup_steps": 0}
    ended = cli("train", settings(learning_rate=rate, steps=20, optimizer={"kind": "SGD"}))
    assert ended.code == 1
    assert re.search(
        r"error: rank \d of 2 failed: the loss is (nan|inf) at step \d+: lower learning_rate.peak or check the data, "
        "and rerun with --find-nan",
        ended.err,
    )
