"""Faults of every kind upon small runs under every kind of plan: does every run end as if nothing had happened?

    python benchmarks/faults.py --faults 300 --seed 0
    python benchmarks/faults.py --faults 20 --kinds full,read-only --plans zero3,streamed

A run (`campaign/run.py`) gets fault after fault at random moments: upon its ranks, its launcher, its folder, its files
(`campaign/kinds.py`). It goes on by itself, or is resumed, as a user would. In the end its losses, validations, gradient norms
and its last checkpoint are compared, digit by digit, with those of a run of the same plan that was left alone, and nothing may be
left: no process, no temporary file, no draft, no lock, no shared memory. A run whose folder was taken away may end instead, in
words, and what it had saved has to be whole. A fault that finds nothing to break, or comes too late, is drawn again.

Exit code 1 on any problem; what such a run left, its log first of all, is kept in a folder that is named.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from campaign.judge import Expected, expected_of
from campaign.kinds import KINDS, Deck, why_not
from campaign.mounts import make_private
from campaign.plans import PLANS, PlanKind
from campaign.run import Verdict, alone, keep, with_faults
from campaign.scene import Scene
from campaign.tally import Tally, show
from injection import shared_memory

FAULTS_PER_RUN = 5
PAUSE_SECONDS = 0.5


class Campaign:
    """Deals faults to runs until so many were put."""

    def __init__(self, plans: list[PlanKind], kinds: list[str], arguments: argparse.Namespace, has_disk: bool) -> None:
        self.num_faults, self.seed, self.has_disk = arguments.faults, arguments.seed, has_disk
        self.timeout_seconds: float = arguments.timeout
        self.most_seconds: float | None = arguments.seconds
        self.folder = Path(tempfile.mkdtemp(prefix="meshwright-faults-"))
        self.kept = Path(arguments.keep or f"faults-{arguments.seed}-kept").absolute()
        decks = {plan.name: Deck(plan, kinds, random.Random(f"{self.seed} {plan.name}")) for plan in plans}
        self.decks = {name: deck for name, deck in decks.items() if not deck.is_empty}
        self.plans = [plan for plan in plans if plan.name in self.decks]
        self.expected: dict[str, Expected] = {}
        self.tally, self.started = Tally(), time.monotonic()
        self.is_given_up = False
        self._turn = self._dealt = 0
        self._lock = threading.Lock()
        self._alone = {plan.name: threading.Lock() for plan in plans}

    def work(self) -> None:
        """Run after run; several threads may do it."""
        while len(self.tally.faults) < self.num_faults and not self.is_given_up and not self._is_late():
            with self._lock:
                wanted = min(FAULTS_PER_RUN, self.num_faults - len(self.tally.faults) - self._dealt)
                number, plan = self._turn, self.plans[self._turn % len(self.plans)]
                kinds = self.decks[plan.name].deal(wanted)
                self._turn, self._dealt = self._turn + bool(kinds), self._dealt + len(kinds)
            if kinds:
                self._one_run(number, plan, kinds)
            else:
                time.sleep(PAUSE_SECONDS)

    def _is_late(self) -> bool:
        return self.most_seconds is not None and time.monotonic() - self.started > self.most_seconds

    def _one_run(self, number: int, plan: PlanKind, kinds: list[str]) -> None:
        expected = self._expected(plan)
        scene = Scene(str(number), plan, self.folder / f"run-{number}", self.has_disk, self.timeout_seconds)
        try:
            verdict = with_faults(scene, kinds, random.Random(f"{self.seed} {number}"), expected)
            kept = keep(scene, self.kept) if not verdict.is_right else None
        finally:
            scene.close()
        shutil.rmtree(scene.folder, ignore_errors=True)
        with self._lock:
            self._dealt -= len(kinds)
            self.decks[plan.name].take_back(verdict.missed)
            self._note(number, plan, verdict, kept)

    def _expected(self, plan: PlanKind) -> Expected:
        with self._alone[plan.name]:
            if plan.name not in self.expected:
                scene = Scene(plan.name, plan, self.folder / f"alone-{plan.name}", self.has_disk, self.timeout_seconds)
                alone(scene)
                self.expected[plan.name] = expected_of(scene)
                scene.close()
            return self.expected[plan.name]

    def _note(self, number: int, plan: PlanKind, verdict: Verdict, kept: Path | None) -> None:
        tally = self.tally
        tally.faults += verdict.faults
        tally.num_runs += 1
        tally.num_right += verdict.is_right
        tally.lost_steps += verdict.lost_steps
        tally.orphans += verdict.orphans
        tally.left_files += len(verdict.left)
        tally.wrong_losses += len(verdict.wrong)
        faults = ", ".join(f"{fault.kind} {fault.detail}".strip() for fault in verdict.faults)
        print(
            f"{len(tally.faults)} faults, {time.monotonic() - self.started:.0f} s; run {number}, {plan.name}: {faults}"
            f"{'' if kept is None else ': NOT RIGHT'}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if kept is not None:
            left = f"; left: {', '.join(verdict.left)}" if verdict.left else ""
            wrong = f"; {len(verdict.wrong)} figures differ, first {verdict.wrong[0]}" if verdict.wrong else ""
            tally.problems.append(
                f"run {number}, {plan.name}, {faults}: {verdict.problem}{left}{wrong}; its log: {kept}/log.txt"
            )
            print(tally.problems[-1], file=sys.stderr, flush=True)


def main() -> None:
    arguments = _parse()
    no_mounts = make_private()
    plans = [plan for plan in PLANS if plan.name in _chosen(arguments.plans, [one.name for one in PLANS], "plan")]
    chosen = _chosen(arguments.kinds, list(KINDS), "kind")
    missing = {kind: why_not(kind, no_mounts) for kind in chosen}
    for kind, reason in missing.items():
        if reason:
            print(f"no fault of the kind '{kind}': {reason}")
    memory = shared_memory()
    campaign = Campaign(plans, [kind for kind in chosen if not missing[kind]], arguments, not no_mounts)
    with ThreadPoolExecutor(arguments.at_once) as threads:
        workers = [threads.submit(campaign.work) for _ in range(arguments.at_once)]
        wait(workers, return_when=FIRST_EXCEPTION)
        campaign.is_given_up = True
        for worker in workers:
            worker.result()
    shutil.rmtree(campaign.folder, ignore_errors=True)
    campaign.tally.shared_memory = len(shared_memory() - memory)
    show(campaign.tally, time.monotonic() - campaign.started)
    sys.exit(bool(campaign.tally.problems or campaign.tally.shared_memory))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help=f"of {', '.join(KINDS)}; all of them by default")
    parser.add_argument(
        "--plans", default="", help=f"of {', '.join(plan.name for plan in PLANS)}; all of them by default"
    )
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time: most of their time is waiting")
    parser.add_argument(
        "--timeout", type=float, default=4.0, help="seconds after which a rank hangs; more on a busy machine"
    )
    parser.add_argument("--seconds", type=float, help="begin no further run after so long, and show what was found")
    parser.add_argument("--keep", default="", help="folder for what runs with problems left")
    return parser.parse_args()


def _chosen(text: str, names: list[str], what: str) -> list[str]:
    chosen = [name for name in text.split(",") if name] or names
    for name in chosen:
        if name not in names:
            raise SystemExit(f"unknown {what} '{name}': use {', '.join(names)}")
    return chosen


if __name__ == "__main__":
    main()
