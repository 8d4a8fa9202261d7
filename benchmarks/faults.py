"""Faults at random upon small runs: does every run end as if nothing had happened?

    python benchmarks/faults.py --faults 100 --seed 0

A run of two ranks gets fault after fault: a random kind (`injection.py`) upon a random rank at a random moment, from the start of
its ranks to well into training and saving. Each time it goes on from its last checkpoint by itself. In the end its losses are
compared, step by step and digit by digit, with those of a run that was left alone; every fifth run goes on with fewer ranks
instead, and has to reach its last step. A fault counts as recovered when its run has passed. Noticed: seconds from the fault
until every rank of that start is gone. A fault that finds nothing to break (a cut before there are connections) is drawn again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from injection import KINDS, alive, children, drafts, inject, ranks_of, shared_memory, why_not

from meshwright.core.cluster import Cluster
from meshwright.train.metrics import read_metrics

MODEL = Path(__file__).parent.parent / "tests" / "assets" / "faulty.py"
NUM_RANKS, STEPS, SAVE_EVERY = 2, 100, 5
TIMEOUT_SECONDS = 4.0
FAULTS_PER_RUN = 10
FEWER_EVERY = 5
"""One run in so many goes on with fewer ranks."""
MOMENTS = 0.7
"""Share of an undisturbed run's length: past that most faults would come too late."""
PATIENCE_SECONDS = 600.0
LOOK_SECONDS = 0.02


@dataclass
class Injected:
    kind: str
    noticed_seconds: float
    recovered: bool = False


@dataclass
class Tally:
    faults: list[Injected] = field(default_factory=list)
    num_runs: int = 0
    num_equal: int = 0
    num_fewer: int = 0
    lost_steps: int = 0
    orphans: int = 0
    drafts: int = 0
    problems: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if not report_missing(kind)]
    memory, started = shared_memory(), time.monotonic()
    tally, chance = Tally(), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="meshwright-faults-") as folder:
        settings = write_settings(Path(folder))
        expected, span = undisturbed(settings, Path(folder, "alone"))
        while len(tally.faults) < arguments.faults and not tally.problems:
            wanted = min(FAULTS_PER_RUN, arguments.faults - len(tally.faults))
            one_run(tally, chance, kinds, settings, Path(folder, f"run-{tally.num_runs}"), wanted, expected, span)
            print(f"{len(tally.faults)} faults, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    show(tally, time.monotonic() - started, len(shared_memory() - memory))
    sys.exit(bool(tally.problems))


def report_missing(kind: str) -> str:
    reason = why_not(kind)
    if reason:
        print(f"no fault of the kind '{kind}': {reason}")
    return reason


def write_settings(folder: Path) -> Path:
    """A cluster by name, so that nothing is measured: what it promises does not matter here."""
    import tomli_w

    cluster = Cluster.named("h200-single", hosts=NUM_RANKS)
    path = folder / "settings.toml"
    values = {
        "model": f"{MODEL}:told", "cluster": str(cluster.save(folder / "cluster.json")), "nproc": NUM_RANKS, "device": "cpu",
        "steps": STEPS, "timeout": TIMEOUT_SECONDS, "tensorboard": False, "plan": {"global_batch": 8, "precision": "fp32"},
        "checkpoint": {"every": SAVE_EVERY}, "data": {"validation_every": 0}, "faults": {"restarts": 1000},
    }  # fmt: skip
    path.write_text(tomli_w.dumps(values))
    return path


def start(settings: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    log = out.with_suffix(".log").open("w")
    command = [sys.executable, "-m", "meshwright", "train", str(settings), "--out", str(out), *flags]
    return subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True)


def undisturbed(settings: Path, out: Path) -> tuple[list[tuple[int, float]], float]:
    """Losses of a run that is left alone, and in how many seconds of its ranks' life a fault may come."""
    run = start(settings, out)
    wait(lambda: ranks_of(run.pid), run)
    begun = time.monotonic()
    if run.wait(PATIENCE_SECONDS):
        raise SystemExit(f"the run that was left alone failed:\n{out.with_suffix('.log').read_text()}")
    return losses(out), MOMENTS * (time.monotonic() - begun)


def one_run(
    tally: Tally, chance: random.Random, kinds: list[str], settings: Path, out: Path, wanted: int,
    expected: list[tuple[int, float]], span: float,
) -> None:  # fmt: skip
    """A run with faults until it has had so many, or comes to its end before them."""
    fewer = tally.num_runs % FEWER_EVERY == FEWER_EVERY - 1
    run, known, own = start(settings, out, *(["--fewer-ranks"] if fewer else [])), set[int](), []
    while len(own) < wanted and wait(lambda: fresh_ranks(run, known), run):
        time.sleep(chance.uniform(0.0, span))
        ranks = ranks_of(run.pid)
        if run.poll() is not None or not ranks:
            continue
        kind, rank = chance.choice(kinds), chance.choice(sorted(ranks))
        begun = time.monotonic()
        if not inject(kind, rank, ranks):
            continue
        known.update(ranks.values())
        wait(lambda ranks=ranks: not any(alive(process) for process in ranks.values()), run)  # type: ignore[misc]
        own.append(Injected(kind, time.monotonic() - begun))
    tally.num_runs += 1
    tally.faults += own
    judge(tally, run, out, own, None if fewer else expected)


def fresh_ranks(run: subprocess.Popen[str], known: set[int]) -> bool:
    return bool(set(ranks_of(run.pid).values()) - known)


def judge(
    tally: Tally, run: subprocess.Popen[str], out: Path, own: list[Injected], expected: list[tuple[int, float]] | None
) -> None:
    """expected: of a run on as many ranks throughout; None where ranks were given up."""
    ranks: set[int] = set()
    if not wait(lambda: ranks.update(ranks_of(run.pid).values()) or run.poll() is not None, run) and run.poll() is None:
        tally.problems.append(f"{out.name} did not end:\n{out.with_suffix('.log').read_text()[-3000:]}")
        os.killpg(run.pid, 9)
        run.wait()
    code = run.wait()
    tally.orphans += sum(alive(process) for process in ranks) + len(list(children(run.pid)))
    found = losses(out)
    passed = code == 0 and (found == expected if expected else [step for step, _ in found] == list(range(STEPS)))
    if not passed and not tally.problems:
        words = "other losses" if code == 0 else f"exit code {code}"
        tally.problems.append(f"{out.name} ended with {words}:\n{out.with_suffix('.log').read_text()[-3000:]}")
    for fault in own if passed else own[:-1]:
        fault.recovered = True
    tally.num_equal += bool(passed and expected)
    tally.num_fewer += bool(passed and not expected)
    tally.drafts += len(drafts(out / "checkpoints"))
    log = out / "faults.jsonl"
    noted = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    tally.lost_steps += sum(
        max(0, line["step"] - line["resumed_step"]) for line in noted if line.get("step") is not None
    )


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def wait(condition: Callable[[], object], run: subprocess.Popen[str]) -> bool:
    """Until it holds; False where the run ended, or patience did, before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if condition():
            return True
        if run.poll() is not None:
            return False
        time.sleep(LOOK_SECONDS)
    return False


def show(tally: Tally, seconds: float, leaked: int) -> None:
    recovered = sum(fault.recovered for fault in tally.faults)
    print(f"recovered            {recovered} / {len(tally.faults)} in {seconds:.0f} s, {tally.num_runs} runs")
    for kind in KINDS:
        own = [fault for fault in tally.faults if fault.kind == kind]
        if own:
            times = [fault.noticed_seconds for fault in own]
            print(
                f"  {kind:8} {sum(fault.recovered for fault in own):3} / {len(own):<3} noticed after "
                f"{statistics.median(times):.1f} s (median), {max(times):.1f} s (longest); time limit {TIMEOUT_SECONDS:g} s"
            )
    print(
        f"losses equal to the undisturbed run's: {tally.num_equal} runs; ended on fewer ranks: {tally.num_fewer} runs"
    )
    print(f"lost steps           {tally.lost_steps} ({tally.lost_steps / max(1, len(tally.faults)):.1f} per fault)")
    print(f"orphan processes     {tally.orphans}")
    print(f"leaked shared memory {leaked}")
    print(f"torn checkpoints     {tally.drafts}")
    for problem in tally.problems:
        print(problem)


if __name__ == "__main__":
    main()
