"""Python blocks of the README and the guide run as they stand, in a folder of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import hand_cluster
from command import Cli

from meshwright.capturing.capture import capture_source
from meshwright.core.plan import Mesh
from meshwright.cost.estimate import estimate
from meshwright.models.source import resolve
from meshwright.rules.plain_plan import plain_plan
from meshwright.training.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block, encoding="utf-8")
    ended = cli(launcher=("-m", "block"))
    assert ended.code == 0, ended.err


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_example_of_three_axes_is_a_plan_for_eight_ranks() -> None:
    settings = Settings.load(ROOT / "examples" / "gpt-3d.toml")
    assert settings.nproc == 8
    graph, cluster = capture_source(resolve(settings.model)), hand_cluster(8)
    plan = plain_plan(settings.plan, graph, settings.nproc, cluster.hash)
    assert (plan.mesh, plan.zero) == (Mesh(pp=2, dp=2, tp=2), 1)
    assert estimate(graph, plan, cluster).fits
