"""A model that nothing is known of is captured in both castings at once, by two processes: as one after the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import Cli

SCRIPT = """
import os, sys
os.environ["XDG_CACHE_HOME"] = sys.argv[1]

from meshwright.planner import graphs

MODEL = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61"
graphs._may_fork = lambda model: True  # torch is loaded here, and nothing was done with it
at_once, forked = graphs._capture_both, []
graphs._capture_both = lambda *asked: forked.append(asked) or at_once(*asked)
found = graphs.both_castings(MODEL, "bf16")
print(len(forked), found == (graphs.capture_now(MODEL, "bf16"), graphs.capture_now(MODEL, "bf16", "parameters")))
print(len(forked), found == graphs.both_castings(MODEL, "bf16"), len(forked))
"""


@pytest.mark.skipif(not hasattr(os, "fork") or (os.cpu_count() or 1) < 2, reason="needs fork and two cores")
def test_two_captures_at_once_are_those_one_after_the_other(cli: Cli, tmp_path: Path) -> None:
    done = cli(tmp_path / "cache", launcher=("-c", SCRIPT))
    assert done.out.splitlines() == ["1 True", "1 True 1"], done.err
