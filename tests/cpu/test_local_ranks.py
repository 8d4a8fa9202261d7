"""Who is to blame when several ranks have failed, each with words of its own."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from meshwright.core.run.fault import Fault, FaultKind
from meshwright.runtime.host_ranks import EndedRank
from meshwright.runtime.launch import describe_failure


def ended(
    folder: Path, rank: int, kind: FaultKind, ranks: tuple[int, ...], seconds: float, by_watchdog: bool = False
) -> EndedRank:
    fault = Fault(
        kind=kind, ranks=ranks, num_ranks=2, host="h", step=3, collective="all_reduce over dp, 4 B", words=kind
    )
    details = {
        "message": kind,
        "seconds": seconds,
        "hang": by_watchdog or kind == "hung",
        "fault": msgspec.to_builtins(fault),
    }
    file = folder / f"{rank}.json"
    file.write_text(json.dumps({"message": {"message": kind, "extraInfo": details}}))
    return EndedRank(1, 100 + rank, str(file))


@pytest.mark.parametrize("kind", ["lost", "raised"])
def test_a_rank_that_waits_for_one_that_has_ended_does_not_call_it_a_hang(tmp_path: Path, kind: FaultKind) -> None:
    failures = {0: ended(tmp_path, 0, "hung", (1,), 9.0), 1: ended(tmp_path, 1, kind, (1,), 4.0)}
    fault = describe_failure(failures, 2).fault
    assert fault is not None
    assert (fault.kind, fault.ranks) == (kind, (1,))


def test_a_rank_that_did_not_answer_and_left_no_word_hangs(tmp_path: Path) -> None:
    failures = {0: ended(tmp_path, 0, "hung", (1,), 9.0), 1: EndedRank(-9, 101, str(tmp_path / "none"))}
    fault = describe_failure(failures, 2).fault
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("hung", (1,))


def test_a_rank_that_was_stopped_and_could_not_hear_the_store_is_the_one_that_hangs(tmp_path: Path) -> None:
    """It is continued for a moment, for its stacks: then its watchdog sees that it has waited for long, and heard nothing."""
    failures = {
        1: ended(tmp_path, 1, "lost", (1,), 9.0, by_watchdog=True),
        0: ended(tmp_path, 0, "hung", (1,), 9.1),
    }
    fault = describe_failure(failures, 2).fault
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("hung", (1,))
