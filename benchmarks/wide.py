"""How far one machine goes: many ranks, many blocks, many microbatches, many checkpoints, many metric lines, a slow disk.

    python benchmarks/wide.py [--only ranks,blocks] [--steps 100000]

Each row is what a user would do, by the command line, with nothing cached:

    ranks          16 ranks on this machine's cores: measured, planned, started
    blocks         1,000 blocks over two ranks with ZeRO 3
    microbatches   64 of them through two stages
    checkpoints    one after every step, 50 kept; then the run goes on from the last
    lines          a run of so many steps on one core, each with its line of metrics; then it is reported and goes on
    slow disk      a checkpoint every five steps where every fsync takes 0.2 s longer (strace puts the delay in)

Printed: seconds from the command to the first step's line, seconds of a step (median, of the second half), seconds and processor
seconds of the whole command, and what follows it: a resume, a report. The exit code is 1 where a command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

COMMAND = (sys.executable, "-m", "meshwright")
TINY = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=256"
SLOW = (
    "strace", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync", "-e",
    "inject=fsync,fdatasync:delay_enter=200000",
)  # fmt: skip
LOOK_SECONDS = 0.05
HEAD = f"{'row':14}{'first step':>12}{'a step':>12}{'in all':>10}{'processor':>12}   then"


class FailedError(Exception):
    pass


@dataclass
class Took:
    """Seconds of one command."""

    first_line: float = 0.0
    in_all: float = 0.0
    processor: float = 0.0


@dataclass
class Run:
    """A run folder and what is done with it."""

    folder: Path
    settings: dict[str, Any]
    before: Sequence[str] = ()
    """What the command is run under."""
    then: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def train(self, *flags: str) -> Took:
        file = self.folder / "settings.toml"
        file.write_text(tomli_w.dumps({"device": "cpu", "tensorboard": False, "out": str(self.out), **self.settings}))
        return self.command("train", str(file), *flags)

    def command(self, *words: str) -> Took:
        """Watched until it ends."""
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        lines, took = self._num_lines(), Took()
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        with (self.folder / "log.txt").open("w") as log:
            process = subprocess.Popen([*self.before, *COMMAND, *words], stdout=log, stderr=log, env=environment)
            while process.poll() is None:
                if not took.first_line and self._num_lines() > lines:
                    took.first_line = time.monotonic() - started
                time.sleep(LOOK_SECONDS if not took.first_line else 20 * LOOK_SECONDS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.in_all = time.monotonic() - started
        took.processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if process.returncode:
            raise FailedError(
                f"{' '.join(words)} ended with {process.returncode}:\n{(self.folder / 'log.txt').read_text()}"
            )
        return took

    def step_seconds(self) -> float:
        lines = [json.loads(line) for line in self._metrics.read_text().splitlines()]
        found = [line["seconds"] for line in lines if "seconds" in line]
        return statistics.median(found[len(found) // 2 :])

    @property
    def _metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    def _num_lines(self) -> int:
        """By its size: nothing is read while a run is timed."""
        return self._metrics.stat().st_size if self._metrics.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"of {', '.join(ROWS)}; all of them by default")
    parser.add_argument("--steps", type=int, default=100_000, help="of the run with many lines")
    arguments = parser.parse_args()
    chosen = [name for name in arguments.only.split(",") if name] or list(ROWS)
    if unknown := set(chosen) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    print(HEAD, flush=True)
    failed = [name for name in chosen if not show(name, arguments.steps)]
    sys.exit(bool(failed))


def show(name: str, num_steps: int) -> bool:
    if name == "slow disk" and shutil.which("strace") is None:
        print(f"{name:14}left out: strace is not installed", flush=True)
        return True
    with tempfile.TemporaryDirectory(prefix="meshwright-wide-") as folder:
        run = Run(Path(folder), {})
        try:
            took = ROWS[name](run, num_steps)
        except FailedError as error:
            print(f"{name:14}failed: {error}", flush=True)
            return False
        print(
            f"{name:14}{took.first_line:10.1f} s{1e3 * run.step_seconds():9.1f} ms{took.in_all:8.1f} s{took.processor:10.1f} s"
            f"   {'; '.join(run.then)}",
            flush=True,
        )
    return True


def many_ranks(run: Run, _: int) -> Took:
    run.settings = {"model": TINY, "nproc": 16, "steps": 5, "plan": {"global_batch": 32}}
    return run.train()


def many_blocks(run: Run, _: int) -> Took:
    run.settings = {
        "model": TINY.replace("layers=2", "layers=1000"), "nproc": 2, "steps": 5, "plan": {"global_batch": 4, "zero": 3},
    }  # fmt: skip
    took = run.train()
    _report(run)
    return took


def many_microbatches(run: Run, _: int) -> Took:
    run.settings = {
        "model": TINY.replace("layers=2", "layers=4"), "nproc": 2, "steps": 10,
        "plan": {"global_batch": 64, "microbatch": 1, "pp": 2, "schedule": "1f1b"},
    }  # fmt: skip
    took = run.train()
    _report(run)
    return took


def many_checkpoints(run: Run, _: int, every: int = 1) -> Took:
    run.settings = {
        "model": TINY, "nproc": 2, "steps": 50, "plan": {"global_batch": 8}, "checkpoint": {"every": every, "keep": 50},
    }  # fmt: skip
    took = run.train()
    kept = [one for one in (run.out / "checkpoints").iterdir() if one.name.startswith("step-")]
    run.then.append(f"{len(kept)} checkpoints, {_bytes(run.out / 'checkpoints') / 2**20:.0f} MiB")
    _go_on(run, 55)
    return took


def many_lines(run: Run, num_steps: int) -> Took:
    """On one core: threads that wait for one another after every op of so small a model would take longer than the steps."""
    run.before = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    run.settings = {
        "model": "mlp:inputs=8,hidden=16,layers=2,classes=4", "nproc": 1, "steps": num_steps, "plan": {"global_batch": 4},
        "checkpoint": {"every": max(1, num_steps // 10)},
    }  # fmt: skip
    took = run.train()
    with (run.out / "metrics.jsonl").open() as file:
        run.then.append(f"{sum(1 for _ in file):,} lines, {(run.out / 'metrics.jsonl').stat().st_size / 2**20:.0f} MiB")
    _report(run)
    _go_on(run, num_steps + 10)
    return took


def slow_disk(run: Run, num_steps: int) -> Took:
    run.before = SLOW
    return many_checkpoints(run, num_steps, every=5)


ROWS: dict[str, Callable[[Run, int], Took]] = {
    "ranks": many_ranks, "blocks": many_blocks, "microbatches": many_microbatches, "checkpoints": many_checkpoints,
    "lines": many_lines, "slow disk": slow_disk,
}  # fmt: skip


def _report(run: Run) -> None:
    page = run.folder / "page.html"
    took = run.command("report", str(run.out), "-o", str(page))
    run.then.append(f"report in {took.in_all:.1f} s, page of {page.stat().st_size / 2**20:.1f} MiB")


def _go_on(run: Run, steps: int) -> None:
    """After it, so many steps are done."""
    took = run.train("--resume", "--steps", str(steps))
    run.then.append(f"goes on after {took.first_line:.1f} s")


def _bytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


if __name__ == "__main__":
    main()
