"""Graphs kept from before: found again, without torch, and captured again when anything they follow from changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import ASSETS

from meshwright.planner import graphs
from meshwright.planner.graphs import capture_now, graph_file, graph_of

MODEL = "gpt:layers=1,hidden=8,heads=2,seq=4,vocab=11"
ASK = f"""
import sys
from meshwright.planner.graphs import graph_of
print(graph_of({MODEL!r}, "fp32").num_parameters, "torch" in sys.modules)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "cache"
    monkeypatch.setattr(os, "environ", os.environ | {"XDG_CACHE_HOME": str(home)})
    return home / "meshwright" / "graphs"


def test_a_known_graph_needs_no_torch(cache: Path) -> None:
    graph = capture_now(MODEL, "fp32")
    assert len(list(cache.iterdir())) == 1
    said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=os.environ)
    assert said.stdout.split() == [str(graph.num_parameters), "False"]


def test_a_kept_graph_is_the_same(cache: Path) -> None:
    assert graph_of(MODEL, "fp32") == graph_of(MODEL, "fp32") == capture_now(MODEL, "fp32")


def never(*_: object) -> None:
    raise AssertionError("it was captured again")


def test_a_known_graph_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(MODEL, "fp32")
    monkeypatch.setattr(graphs, "capture_now", never)
    assert graph_of(MODEL, "fp32") == graph
    with pytest.raises(AssertionError):
        graph_of(MODEL, "bf16")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', "\x00"])
def test_a_file_that_cannot_be_read_is_captured_again(content: str) -> None:
    graph = graph_of(MODEL, "fp32")
    path = graph_file(MODEL, "fp32")
    assert path is not None
    path.write_text(content)
    assert graph_of(MODEL, "fp32") == graph
    assert path.read_text() != content


def test_a_changed_config_is_another_model(tmp_path: Path) -> None:
    config = json.loads((ASSETS / "llama-tiny.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    before = graph_file(f"hf:{path}", "fp32")
    path.write_text(json.dumps(config | {"vocab_size": 128}))
    assert graph_file(f"hf:{path}", "fp32") != before


def test_a_new_capture_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = graph_file(MODEL, "fp32")
    monkeypatch.setattr(graphs, "CAPTURE_VERSION", graphs.CAPTURE_VERSION + 1)
    assert graph_file(MODEL, "fp32") != before


def test_the_users_own_files_are_never_kept(cache: Path) -> None:
    graph_of(f"{ASSETS}/models.py:odd", "fp32")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert graph_of(MODEL, "fp32").num_parameters > 0
