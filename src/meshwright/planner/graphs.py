"""Graphs that were captured before, so that planning needs no torch.

A file in the cache is found by all that a graph follows from: the model's name, the content of its config file, the
precision, and the versions of what captured it. A user's own Python file may import anything: its graph is never kept.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path

import msgspec

from meshwright.core.codec import stable_hash
from meshwright.core.errors import GuessWarning
from meshwright.core.files.cache import cache_folder, content_of, keep, read_kept, version_of
from meshwright.core.graph import CAPTURE_VERSION, Casting, Graph, Precision
from meshwright.core.model_name import config_file, is_config
from meshwright.core.version import VERSION

SIXTEEN_BITS = ("bf16", "fp16")


def graph_of(model: str, precision: Precision, casting: Casting = "autocast") -> Graph:
    """The graph of a named model, read where it is known and captured where it is not."""
    known = _read(model, precision, casting)
    if known is None:
        return capture_now(model, precision, casting)
    for remark in known.remarks:  # a capture says so itself
        warnings.warn(remark, GuessWarning, stacklevel=2)
    return known


def both_castings(model: str, precision: Precision) -> tuple[Graph, Graph | None]:
    """The model as replicas run it, and, in 16 bits, as sharded plans do."""
    if precision not in SIXTEEN_BITS:
        return graph_of(model, precision), None
    if _may_fork(model) and not any(_read(model, precision, casting) for casting in ("autocast", "parameters")):
        return _capture_both(model, precision)
    return graph_of(model, precision), graph_of(model, precision, "parameters")


def _may_fork(model: str) -> bool:
    """Whether the process may fork: this is its only thread, and no code of the user has run."""
    is_ours = graph_file(model, "fp32") is not None and "torch" not in sys.modules
    return is_ours and hasattr(os, "fork") and (os.cpu_count() or 1) > 1 and threading.active_count() == 1


def _capture_both(model: str, precision: Precision) -> tuple[Graph, Graph]:
    """At once, on two cores; the child has torch imported for it."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import meshwright.capturing.capture
    import meshwright.models.source  # noqa: F401
    from meshwright.searching.sharding.integer_program import load_solver

    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        other = child.submit(_captured, model, precision)
        plain = capture_now(model, precision)
        load_solver()  # the search needs it next, and the child is not done
        return plain, msgspec.json.decode(other.result(), type=Graph)


def _captured(model: str, precision: Precision) -> bytes:
    """The capture of the second casting, encoded; its warnings are those of the first, and are not repeated."""
    with warnings.catch_warnings(action="ignore", category=GuessWarning):
        return msgspec.json.encode(capture_now(model, precision, "parameters"))


def capture_now(model: str, precision: Precision, casting: Casting = "autocast") -> Graph:
    """Capture, whatever is known, and keep the graph for the next time."""
    from meshwright.capturing.capture import capture_source
    from meshwright.models.seeded import only_looked_at
    from meshwright.models.source import resolve

    with only_looked_at():
        graph = capture_source(resolve(model), precision, casting)
    if path := graph_file(model, precision, casting):
        keep(path, graph)
    return graph


def graph_file(model: str, precision: Precision, casting: Casting = "autocast") -> Path | None:
    """Where the graph is kept; None for a model that is not."""
    if ".py:" in model or model.endswith(".py"):
        return None
    facts = [model, precision, casting, VERSION, CAPTURE_VERSION, version_of("torch")]
    if is_config(model):
        facts += [content_of(config_file(model)), version_of("transformers")]
    return cache_folder() / "graphs" / f"{stable_hash(facts)}.json"


def _read(model: str, precision: Precision, casting: Casting) -> Graph | None:
    path = graph_file(model, precision, casting)
    return read_kept(path, Graph) if path else None
