"""What is known about a hang: who hangs, where each rank stands, the first collective in which ranks differ, and all stacks.

Ranks number the collectives of each group. Up to some number all ranks of the group called the same; the first number at which
one called another, or none, is where their paths parted.                                                       -> differences
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from meshwright.core.codec import write_whole
from meshwright.runtime.standing import Call, Standing

SIZED = ("all_reduce", "broadcast", "reduce_scatter")
"""Collectives in which every rank gives as much."""


def compose(answers: Mapping[int, Standing], num_ranks: int, timeout_seconds: float) -> str:
    """Who hangs and where, who waits for it and in what."""
    silent = silent_ranks(answers, num_ranks)
    hanging = {rank: answer for rank, answer in answers.items() if answer.waits_in is None}
    waiting = {rank: answer for rank, answer in answers.items() if answer.waits_in is not None}
    culprits = sorted([*silent, *hanging])
    verb = "hangs" if len(culprits) == 1 else "hang"
    head = (
        f"{_ranks(culprits)} of {num_ranks} {verb}: others have waited for {timeout_seconds:g} s"
        if culprits
        else f"all {num_ranks} ranks have waited for {timeout_seconds:g} s, in different collectives: their paths parted"
    )
    lines = [head]
    lines += [
        f"  rank {rank} does not answer: it is stopped, in native code that holds Python, or cut off" for rank in silent
    ]
    lines += [f"  rank {rank} stands at {answer.line}" for rank, answer in hanging.items()]
    together = sorted(waiting.items(), key=lambda item: (item[1].waits_in, item[1].line, item[0]))
    for (waits_in, line), group in groupby(together, key=lambda item: (item[1].waits_in, item[1].line)):
        members = [rank for rank, _ in group]
        lines.append(f"  {_ranks(members)} {'waits' if len(members) == 1 else 'wait'} in {waits_in}, at {line}")
    return "\n".join(
        [*lines, "  give more time with --timeout SECONDS (0: no limit) if the work there takes that long"]
    )


def silent_ranks(answers: Mapping[int, Standing], num_ranks: int) -> list[int]:
    return [rank for rank in range(num_ranks) if rank not in answers]


def culprits_of(answers: Mapping[int, Standing], num_ranks: int) -> list[int]:
    """The ranks that wait for nobody; all, where each waits for another."""
    found = [rank for rank in range(num_ranks) if rank not in answers or answers[rank].waits_in is None]
    return found or list(range(num_ranks))


def differences(answers: Mapping[int, Standing]) -> list[str]:
    """For each group of ranks, the first collective that not all of them called alike."""
    groups = dict.fromkeys(call.group for answer in answers.values() for call in answer.calls)
    found = []
    for group in groups:
        by_rank = {
            rank: {call.number: call for call in answer.calls if call.group == group}
            for rank, answer in answers.items()
        }
        found += _first_difference({rank: calls for rank, calls in by_rank.items() if calls})
    return found


def _first_difference(by_rank: dict[int, dict[int, Call]]) -> list[str]:
    """Numbers that some rank no longer remembers are left out."""
    if len(by_rank) < 2:
        return []
    start = max(min(calls) for calls in by_rank.values())
    stop = max(max(calls) for calls in by_rank.values())
    for number in range(start, stop + 1):
        called = {rank: calls.get(number) for rank, calls in by_rank.items()}
        if len({_likeness(call) for call in called.values()}) > 1:
            over = next(call.over for call in called.values() if call is not None)
            lines = [
                f"  rank {rank}: {'has not called it' if call is None else call.words}" for rank, call in called.items()
            ]
            return [f"collective number {number} over {over}:", *lines]
    return []


def _likeness(call: Call | None) -> tuple[str, str]:
    if call is None:
        return "", ""
    return call.kind, call.words if call.kind in SIZED else ""


def write_report(file: Path, words: str, answers: Mapping[int, Standing], stacks: Mapping[int, str]) -> None:
    """One file for all ranks. stacks: of those that did not answer, as far as they could be had."""
    parted = differences(answers)
    parts = [words, "The collective that differs", "\n".join(parted or ["none is known: ranks called the same ones"])]
    for rank in sorted({*answers, *stacks}):
        answer = answers.get(rank)
        where = f"host {answer.host}, step {answer.step}" if answer else "it did not answer"
        parts += [f"Rank {rank} ({where})", answer.stacks if answer else stacks[rank] or "no stack could be had"]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "\n\n".join(parts) + "\n")


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
