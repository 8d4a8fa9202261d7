"""The fit to published runs: what it reads, and that it runs on captured graphs of any precision."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from test_published import HEADER, ROW, run_of, write
from test_score import SIZES, graph_of

from meshwright.core import constants
from meshwright.core.cluster import catalogue
from meshwright.core.errors import MeshwrightError


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "fit_published.py"))


def test_an_unknown_cluster_is_named(tmp_path: Path, script: dict[str, Any]) -> None:
    path = write(tmp_path, HEADER, ROW.replace("jeanzay", "jeanzai"))
    with pytest.raises(MeshwrightError, match="did you mean 'a100-80g-jeanzay'"):
        script["timed_runs"](str(path), catalogue())


def test_rows_without_a_time_or_that_cannot_be_read_are_left_out(tmp_path: Path, script: dict[str, Any]) -> None:
    path = write(tmp_path, HEADER, ROW, ROW.replace("134.02", ""), ROW.replace("14336", "wide"))
    assert len(script["timed_runs"](str(path), catalogue())) == 1


def test_a_constant_is_fitted(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fit = script["fit"]
    monkeypatch.setitem(fit.__globals__, "graph_of", graph_of)
    file = json.loads(script["FILE"].read_text(encoding="utf-8"))
    monkeypatch.setattr(constants, "_families", lambda: file)
    runs = [run_of(cluster="a100-80g-selene", precision=word, step_seconds=1.0, **SIZES) for word in ("bf16", "fp32")]
    share, origin = fit("A100", runs, catalogue(), file)["matmul_share"]
    least, most, _ = script["FREE"]["A100"]["matmul_share"]
    assert least <= share <= most
    assert origin == "fit: new"
