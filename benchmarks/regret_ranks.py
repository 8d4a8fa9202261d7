"""What the two ranks of the regret benchmark do: probe the link, then run every plan of each workload.

One group of ranks lives through all plans of a link. A plan for one device runs in a process of its own beside rank 0, on its
core, while the ranks wait: its group has one rank. Every plan is built, warmed up and timed alone first; those near the best
one, the chosen one and the standing answers (plain DDP, ZeRO 3) then stay alive together and take turns, so that a ratio of two
is one of the same minutes. Seconds of a turn are the slower rank's. Beside them stand the seconds of the first look in which the
busier rank's processor worked for it, which tell compute from waiting even on a machine that others use.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regret_choice
from regret_programs import Contestant, Solo
from regret_space import WORKLOADS, every_plan, graph_and_source, legal_shardings, words_of

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster
    from meshwright.core.plan import Plan
    from meshwright.runtime.ranks import Rank

WARMUP_STEPS, FIRST_STEPS = 2, 2
FINALISTS = 10
NEAR = 1.3
"""Times the best of the first look: plans up to this far go into the final turns."""
TURN_SECONDS, MOST_STEPS = 0.3, 5
"""How long a turn of the finals is to be, in whole steps."""
PATIENCE_SECONDS = 600.0


def run_rank(payload: dict[str, Any]) -> None:
    """All workloads of one link; rank 0 writes a file after each."""
    from meshwright.runtime.ranks import joined

    with joined("cpu", timeout_seconds=PATIENCE_SECONDS) as rank:
        cluster = cluster_of(payload, rank)
        solo = Solo() if rank.is_first else None
        for name, file in payload["files"].items():
            found = Cell(name, payload, cluster, solo, rank.is_first).measure()
            if rank.is_first:
                Path(file).write_text(json.dumps(found, indent=1))
        if solo is not None:
            solo.end()


def cluster_of(payload: dict[str, Any], rank: Rank) -> Cluster:
    """Probed now, or as a run that this one goes on with had it."""
    from meshwright.core.cluster import Cluster
    from meshwright.measure.probe import measure_cluster

    if payload["is_probed"]:
        return Cluster.load(payload["cluster_file"])
    say(f"{payload['link']}: probing", rank.is_first)
    cluster = measure_cluster(rank)
    if rank.is_first:
        cluster.save(payload["cluster_file"])
    return cluster


class Cell:
    """One workload on one link."""

    def __init__(self, name: str, payload: dict[str, Any], cluster: Cluster, solo: Solo | None, is_first: bool) -> None:
        self.name, self.payload, self.cluster, self.solo, self.is_first = name, payload, cluster, solo, is_first
        self.workload = WORKLOADS[name]
        self.title = f"{name}, {payload['link']}"

    def measure(self) -> dict[str, Any]:
        import torch.distributed as dist

        choice: list[Any] = [self._choose() if self.is_first else None]
        dist.broadcast_object_list(choice)
        plans, refused, predicted, standing = choice[0]
        first = self._look(plans)
        finalists = finalists_of(first, standing)
        turns = self._finals({number: plans[number] for number in finalists})
        from msgspec import to_builtins

        rows = [
            {
                "words": words_of(plan),
                "plan": to_builtins(plan),
                **predicted[number],
                "first_seconds": first[number]["seconds"],
                "busy_seconds": first[number]["busy"],
                "error": first[number]["error"],
                "turns": turns.get(number, []),
            }
            for number, plan in enumerate(plans)
        ]
        return {
            "workload": self.name,
            "link": self.payload["link"],
            "model": self.workload.model,
            "global_batch": self.workload.global_batch,
            "cluster": self.cluster.hash,
            "refused": refused,
            "standing": standing,
            "rows": rows,
        }

    def _choose(self) -> tuple[list[Plan], list[str], list[dict[str, Any]], dict[str, int]]:
        """Every plan and its prediction, and which of them is chosen, plain DDP and ZeRO 3. Rank 0 alone does this."""
        graph, source = graph_and_source(self.workload)
        legal = legal_shardings(graph, source)
        plans, refused = every_plan(graph, self.workload.global_batch, legal, self.cluster.hash)
        if self.payload["quick"]:
            plans = regret_choice.thinned(plans)
        say(f"{self.title}: {len(plans)} plans, choosing", True)
        chosen = regret_choice.CHOOSERS[self.payload["choose"]](
            graph, self.cluster, plans, self.workload.global_batch, legal
        )
        is_outside = chosen not in plans
        if is_outside:
            plans.append(chosen)
        predicted = [regret_choice.prediction(graph, plan, self.cluster) for plan in plans]
        standing = {"chosen": plans.index(chosen), **regret_choice.standing_answers(plans)}
        say(f"{self.title}: chosen {words_of(chosen)}" + (" (outside the list)" if is_outside else ""), True)
        return plans, refused, predicted, standing

    def _look(self, plans: list[Plan]) -> list[dict[str, Any]]:
        """Each plan alone, a few steps."""
        found = []
        for number, plan in enumerate(plans):
            contestant = Contestant(plan, self.workload.model, number, self.solo)
            error = contestant.build()
            seconds = busy = None
            if not error:
                contestant.turn(WARMUP_STEPS)
                seconds, busy = contestant.turn(FIRST_STEPS)
            contestant.drop()
            found.append({"seconds": seconds, "busy": busy, "error": error})
            words = error or f"{1e3 * (seconds or 0):.0f} ms"
            say(f"{self.title}: {number + 1} of {len(plans)}: {words_of(plan)}: {words}", self.is_first)
        return found

    def _finals(self, plans: dict[int, Plan]) -> dict[int, list[float]]:
        """All of them alive, in turns whose order rotates."""
        contestants = {
            number: Contestant(plan, self.workload.model, number, self.solo) for number, plan in plans.items()
        }
        lengths = {}
        for number, contestant in contestants.items():
            contestant.build()
            seconds, _ = contestant.turn(WARMUP_STEPS)
            lengths[number] = max(1, min(MOST_STEPS, round(TURN_SECONDS / seconds)))
        turns: dict[int, list[float]] = {number: [] for number in contestants}
        order = list(contestants)
        for number in range(self.payload["rounds"]):
            first = number % len(order)
            for one in order[first:] + order[:first]:
                turns[one].append(contestants[one].turn(lengths[one])[0])
            say(f"{self.title}: round {number + 1} of {self.payload['rounds']}, {len(order)} plans", self.is_first)
        for contestant in contestants.values():
            contestant.drop()
        return turns


def finalists_of(first: list[dict[str, Any]], standing: dict[str, int]) -> list[int]:
    """Those near the best of the first look, and the standing ones."""
    ran = sorted((row["seconds"], number) for number, row in enumerate(first) if row["seconds"] is not None)
    near = [number for seconds, number in ran if seconds <= NEAR * ran[0][0]][:FINALISTS]
    return sorted({*near, *(number for number in standing.values() if first[number]["seconds"] is not None)})


def typical(turns: list[float]) -> float:
    """The median of the faster half: the slower half is what other programs did."""
    return statistics.median(sorted(turns)[: (len(turns) + 1) // 2])


def say(words: str, is_first: bool) -> None:
    """Progress: one line that changes on a terminal, lines in a file."""
    if is_first:
        is_terminal = sys.stderr.isatty()
        print(
            f"\r\x1b[K{words[:110]}" if is_terminal else words,
            end="" if is_terminal else "\n",
            file=sys.stderr,
            flush=True,
        )
