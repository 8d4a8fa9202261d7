"""A model that nothing is known of is captured in both castings at once, by two processes: as one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from meshwright.planner import graphs

MODEL = "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=61"
at_once, forked = graphs._capture_both, []
graphs._capture_both = lambda *asked: forked.append(asked) or at_once(*asked)
found = graphs.both_castings(MODEL, "bf16")
print(len(forked), found == (graphs.capture_now(MODEL, "bf16"), graphs.capture_now(MODEL, "bf16", "parameters")))
print(len(forked), found == graphs.both_castings(MODEL, "bf16"), len(forked))
"""


@pytest.mark.skipif(not hasattr(os, "fork") or (os.cpu_count() or 1) < 2, reason="needs fork and two cores")
def test_two_captures_at_once_are_those_one_after_the_other(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["1 True", "1 True 1"], done.stderr
