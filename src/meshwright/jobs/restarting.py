"""How a run goes on after a fault: with the same ranks, or with fewer under a plan made anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from rich.console import Console

from meshwright.core.axes import AXES
from meshwright.core.cluster import Cluster
from meshwright.core.errors import InfeasibleError, PlanError
from meshwright.core.plan import Plan
from meshwright.core.request import PlanRequest
from meshwright.core.result import describe
from meshwright.core.run.fault import Fault
from meshwright.jobs.layout import write_plan
from meshwright.planner.decision import Decision, decide, precision_of_run
from meshwright.planner.graphs import both_castings
from meshwright.runtime.restarts import Attempt
from meshwright.training.company import mend
from meshwright.training.folder import RunFolder
from meshwright.training.kept import clear_left, latest, step_of
from meshwright.training.places import places_of
from meshwright.training.settings import Settings

LOSING = ("killed", "hung", "lost", "corrupt")
"""Faults after which a rank may be done without."""
LAID = (*AXES, "virtual", "hybrid", "sequence_parallel", "context", "microbatch", "schedule")
"""What a request says about how a model lies over ranks: given up where it does not suit the ranks that are left."""


class Restarting:
    """Decides the next attempt of a run on local ranks, says so, and writes it down."""

    def __init__(self, settings: Settings, decision: Decision, console: Console) -> None:
        self.settings, self.decision, self.console = settings, decision, console
        self.num_restarts = 0

    def next_attempt(self, fault: Fault, attempt: Attempt) -> Attempt:
        folder = RunFolder(attempt.payload["folder"])
        self.num_restarts = attempt.number + 1
        mend(folder, self.console.print)
        num_ranks = self._num_ranks(fault, attempt, folder)
        clear_left(folder.checkpoints)
        step = resumable_step(folder)
        self._say(fault, num_ranks, step)
        note(folder, fault, self.num_restarts, num_ranks, step)
        return Attempt({**attempt.payload, "resume": step > 0}, num_ranks, self.num_restarts)

    def _num_ranks(self, fault: Fault, attempt: Attempt, folder: RunFolder) -> int:
        if self.settings.faults.ranks == "same" or fault.kind not in LOSING or attempt.num_ranks == 1:
            return attempt.num_ranks
        all_lost_a_link = len(fault.ranks) == attempt.num_ranks  # one of them is to blame
        lost = 1 if all_lost_a_link else len(fault.ranks)
        self.settings, self.decision = replan(self.settings, attempt.num_ranks - lost, folder)
        write_plan(folder, self.settings, self.decision)
        return self.decision.plan.world

    def _say(self, fault: Fault, num_ranks: int, step: int) -> None:
        ranks = "1 rank goes" if num_ranks == 1 else f"{num_ranks} ranks go"
        on = f"on from step {step}" if step else "from the beginning: there is no checkpoint yet"
        plan = f"; plan: {describe(self.decision.plan)}" if num_ranks != fault.num_ranks else ""
        self.console.print(f"fault: {fault.words}")
        self.console.print(f"restart {self.num_restarts} of {self.settings.faults.restarts}: {ranks} {on}{plan}")


def resumable_step(folder: RunFolder) -> int:
    """Of the newest whole checkpoint; 0 where there is none."""
    newest = latest(places_of(folder))
    return step_of(newest) if newest is not None else 0


def note(folder: RunFolder, fault: Fault, restart: int, num_ranks: int, step: int) -> None:
    """One line a fault. A disk that is full loses the line, not the run."""
    line: dict[str, Any] = {
        "restart": restart, "resumed_step": step, "resumed_ranks": num_ranks, **msgspec.to_builtins(fault),
    }  # fmt: skip
    with suppress(OSError), folder.faults.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def replan(settings: Settings, num_ranks: int, folder: RunFolder) -> tuple[Settings, Decision]:
    """The most ranks, at most so many, for which there is a plan of the same global batch; its settings and the plan.

    What was asked for is kept as long as it suits them.
    """
    graphs = both_castings(settings.model, precision_of_run(settings))
    cluster: Cluster = Cluster.load(folder.cluster)
    before = Plan.load(folder.plan)
    reasons = []
    for world in range(num_ranks, 0, -1):
        for wish in wishes(settings, before, world):
            try:
                return wish, decide(wish, graphs, cluster, world)
            except (PlanError, InfeasibleError) as error:
                reasons.append(f"{world} ranks: {error}")
    raise PlanError(f"no plan for {num_ranks} ranks or fewer that goes on with this run: {reasons[0]}")


def wishes(settings: Settings, before: Plan, world: int) -> Iterator[Settings]:
    """As asked; then with degrees left open; then searched."""
    asked = _request(settings, before)
    free = msgspec.structs.replace(asked, **dict.fromkeys(LAID))
    base = msgspec.structs.replace(settings, nproc=world, plan_file=None)
    yield msgspec.structs.replace(base, plan=asked)
    yield msgspec.structs.replace(base, plan=free)
    if settings.planner != "search":
        yield msgspec.structs.replace(base, plan=free, planner="search")


def _request(settings: Settings, before: Plan) -> PlanRequest:
    """What the run was asked for; of a plan file, what does not depend on the number of ranks."""
    batch = PlanRequest(global_batch=before.global_batch)
    if settings.plan_file is None:
        return settings.plan.updated(batch)
    return batch.updated(PlanRequest(precision=before.precision, zero=before.zero, compile=before.compile))
