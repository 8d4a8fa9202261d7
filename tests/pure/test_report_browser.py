"""The report in a real browser: every section is drawn, hovering and toggling work, nothing leaves the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, Tab
from runs import run_of

from meshwright.report.page import page
from meshwright.report.run import Run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

CHARTS = (
    "cluster", "gantt", "memory", "time by part", "histogram", "bytes by axis", "seconds of communication",
    "busy seconds of each rank", "loss", "learning rate", "tokens per second",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def opened(browser: Browser, folder: Path, runs: list[Run], width: int = 1200, *, dark: bool = False) -> Tab:
    file = folder / "report.html"
    file.write_text(page(runs, "a test's runs"), encoding="utf-8")
    return browser.open(file.as_uri(), width, dark=dark)


def check_quiet(tab: Tab) -> None:
    """No complaint on the console, and no request but for the page itself."""
    assert tab.complaints == []
    asked = [address for address in tab.requests if not address.startswith("data:")]
    assert len(asked) == 1
    assert asked[0].endswith("report.html")


@pytest.mark.parametrize("width", [1200, 380], ids=["desk", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_section_is_drawn(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    tab = opened(browser, tmp_path, [run_of(pp=2, dp=2)], width, dark=dark)
    for chart in CHARTS:
        count = tab.ask(f"document.querySelectorAll('[data-chart=\"{chart}\"] :is(svg *, .device)').length")
        assert count > 3, f"{chart} is empty"
    assert tab.ask("document.documentElement.scrollWidth") <= width, "the page is wider than its window"
    ground = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 27)") is dark
    check_quiet(tab)
    assert tab.screenshot(tmp_path / "page.png").stat().st_size > 20_000


def test_hovering_says_exact_figures(browser: Browser, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path, [run_of()])
    assert "in use: " in (said := tab.hover('[data-chart="memory"] svg', 0.4))
    assert "optimizer state: 7.81 KiB" in said
    assert "predicted: " in said
    assert "stage 0, microbatch" in tab.hover('[data-chart="gantt"] svg', 0.4, 0.1)
    assert "all-reduce" in tab.hover('[data-chart="bytes by axis"] svg', 0.5, 0.25)
    assert "steps" in tab.hover('[data-chart="histogram"] svg', 0.5)
    assert "training loss: " in tab.hover('[data-chart="loss"] svg', 0.5)
    assert "rank 1 on host 0" in tab.hover('[data-chart="cluster"] .device:nth-child(2)')
    assert tab.hover("h1") == ""
    check_quiet(tab)


def test_categories_and_ranks_are_chosen(browser: Browser, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path, [run_of()])
    drawn = "document.querySelectorAll('[data-chart=\"memory\"] path[data-part=activations]').length"
    assert tab.ask(drawn) == 1
    tab.click("#run-0-memory button[data-part=activations]")
    assert tab.ask(drawn) == 0
    assert "activations" not in tab.hover('[data-chart="memory"] svg', 0.4)
    tab.click("#run-0-memory button[data-part=activations]")
    assert tab.ask(drawn) == 1
    tab.ask(
        "(s => { s.value = 0; s.dispatchEvent(new Event('change')); })(document.querySelector('#run-0-memory select'))"
    )
    assert "parameters: 3.91 KiB" in tab.hover('[data-chart="memory"] svg', 0.4)
    tab.click("#run-0-gantt button[data-part=waiting]")
    assert tab.ask("document.querySelectorAll('[data-chart=\"gantt\"] rect[data-part=waiting]').length") == 0
    check_quiet(tab)


def test_the_schedule_is_zoomed(browser: Browser, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path, [run_of()])
    widest = (
        "Math.max(...[...document.querySelectorAll('[data-chart=\"gantt\"] rect')].map(r => +r.getAttribute('width')))"
    )
    before = tab.ask(widest)
    tab.drag('[data-chart="gantt"] svg', 0.3, 0.5)
    assert tab.ask(widest) > 1.5 * before
    tab.drag('[data-chart="gantt"] svg', 0.5, 0.5)
    assert tab.ask(widest) == before
    check_quiet(tab)


def test_runs_side_by_side(browser: Browser, tmp_path: Path) -> None:
    runs = [run_of("replicas"), run_of("shards", zero=3)]
    tab = opened(browser, tmp_path, runs)
    assert "replicas" in tab.hover('[data-chart="peaks"] svg', 0.5, 0.2)
    for chart in ("median step of each run", "optimizer state of each run", "gradients over the step"):
        assert "shards" in tab.hover(f'[data-chart="{chart}"] svg', 0.5, 0.6)
    assert tab.ask("document.querySelectorAll('[data-part=gradients]').length") >= 2
    assert tab.ask("document.getElementById('run-1').hidden") is True
    tab.click("nav.runs button:nth-child(2)")
    assert tab.ask("document.getElementById('run-1').hidden") is False
    assert tab.ask("document.querySelectorAll('#run-1-memory svg path').length") > 1
    check_quiet(tab)


CLIPPED = """[...document.querySelectorAll('svg text')].filter(node => {
    const box = node.getBoundingClientRect();
    return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5);
}).map(node => node.textContent)"""


@pytest.mark.parametrize("width", [1200, 390], ids=["desk", "phone"])
def test_no_label_is_cut_off(browser: Browser, tmp_path: Path, width: int) -> None:
    """Of many runs with long names, whose ends tell them apart; and of one run."""
    names = [f"a comparison of long names, run {number}" for number in range(11)]
    tab = opened(browser, tmp_path, [run_of(name, zero=3) for name in names], width)
    assert tab.ask(CLIPPED) == []
    shown = tab.ask("[...document.querySelectorAll('[data-chart=peaks] text')].map(node => node.textContent)")
    assert sum(name.endswith("run 10") for name in shown) == 1
    assert "run 3" in tab.hover('[data-chart="histogram of each run"] svg', 0.6, 3.5 / 12)
    assert tab.ask("document.documentElement.scrollWidth") <= width
    check_quiet(tab)
    one = opened(browser, tmp_path, [run_of(pp=2, dp=2)], width)
    assert one.ask(CLIPPED) == []


def test_theme_and_print(browser: Browser, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path, [run_of()])
    tab.click("button.theme")
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.pdf().startswith(b"%PDF")
    check_quiet(tab)


def test_a_plan_that_has_not_run(browser: Browser, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path, [replace(run_of(pp=4, dp=1), traces=(), metrics=(), settings="")])
    for chart in ("cluster", "gantt", "memory", "time by part", "bytes by axis"):
        assert tab.ask(f"document.querySelectorAll('[data-chart=\"{chart}\"] :is(svg *, .device)').length") > 3, chart
    assert "microbatch" in tab.hover('[data-chart="gantt"] svg', 0.5, 0.2)
    check_quiet(tab)


@pytest.mark.slow
def test_a_large_run_stays_small_and_opens(browser: Browser, tmp_path: Path) -> None:
    """With steps of thousands of bars a rank and stream, as deep pipelines have them; opened is when all pictures are drawn."""
    run = run_of(num_steps=1000, num_bars=3000, num_calls=3000, dp=8, pp=8, microbatch=1, global_batch=256)
    assert len(run.traces) == 64
    started = time.monotonic()
    tab = opened(browser, tmp_path, [run])
    print(f"written and opened in {time.monotonic() - started:.2f} s")
    assert (tmp_path / "report.html").stat().st_size < 10e6
    assert tab.ask("document.querySelectorAll('[data-chart=\"gantt\"] rect').length") > 100
    spent = tab.ask("performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"{(tmp_path / 'report.html').stat().st_size / 1e6:.2f} MB, loaded in {spent:.0f} ms")
    assert tab.ask("document.querySelectorAll('#run-0-gantt select option').length") > 1
    check_quiet(tab)
