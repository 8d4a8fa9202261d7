"""Graphs that several processes of one test run need: the first that does captures one, the others read it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from meshwright.capturing.capture import capture_source
from meshwright.core.codec import stable_hash
from meshwright.core.graph import Graph, Precision
from meshwright.models.source import ModelSource

FOLDER = "MESHWRIGHT_TEST_GRAPHS"
"""Of the environment: set for one run by tests/conftest.py, and known to all workers and ranks."""


def shared_graph(source: ModelSource, precision: Precision, name: str = "") -> Graph:
    """name: what tells the model from all others, where its own name does not."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return capture_source(source, precision)
    path = Path(folder, f"{stable_hash((name or source.name, precision))}.json")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a pool all come at once
        if not path.exists():
            capture_source(source, precision).save(path)
    return Graph.load(path)
