"""What a campaign has come to, by kind of fault and by plan."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from campaign.fault import Fault, Outcome


@dataclass
class Tally:
    faults: list[Fault] = field(default_factory=list)
    num_runs: int = 0
    num_right: int = 0
    lost_steps: int = 0
    orphans: int = 0
    left_files: int = 0
    wrong_losses: int = 0
    shared_memory: int = 0
    problems: list[str] = field(default_factory=list)


def show(tally: Tally, seconds: float) -> None:
    right = [fault for fault in tally.faults if fault.is_right]
    ended = sum(fault.outcome is Outcome.ENDED for fault in right)
    print(
        f"recovered, or ended with the newest state whole: {len(right)} / {len(tally.faults)} ({ended} ended) "
        f"in {seconds:.0f} s, {tally.num_runs} runs"
    )
    _show_by("kind", tally.faults, lambda fault: fault.kind)
    _show_by("plan", tally.faults, lambda fault: fault.plan)
    details = Counter(f"{fault.kind}: {fault.detail}" for fault in tally.faults if fault.detail)
    print("; ".join(f"{name} ({count})" for name, count in sorted(details.items())))
    print(f"runs as if nothing had happened  {tally.num_right} / {tally.num_runs}")
    print(f"lost steps           {tally.lost_steps} ({tally.lost_steps / max(1, len(tally.faults)):.1f} per fault)")
    print(f"orphan processes     {tally.orphans}")
    print(f"left files           {tally.left_files}")
    print(f"leaked shared memory {tally.shared_memory}")
    print(f"wrong losses         {tally.wrong_losses}")
    for problem in tally.problems:
        print(f"problem: {problem}")


def _show_by(what: str, faults: list[Fault], name_of: Callable[[Fault], str]) -> None:
    for name in dict.fromkeys(sorted(map(name_of, faults))):
        own = [fault for fault in faults if name_of(fault) == name]
        times = [fault.seconds for fault in own]
        counts = [
            sum(fault.is_right and fault.outcome is outcome for fault in own)
            for outcome in (Outcome.RECOVERED, Outcome.ENDED)
        ]
        print(
            f"  {what} {name:10} {counts[0]:3} recovered, {counts[1]:2} ended whole, of {len(own):<3} "
            f"through after {statistics.median(times):.1f} s (median), {max(times):.1f} s (longest)"
        )
