"""A sample of the survey: no cell is wrong, ends in a traceback or hangs, and what docs/survey.md shows at parity stays so.

The sample is another one for every state of src/, always the same for one; --every-row runs all cells.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import survey_page
from survey_cells import GOOD, Cell, architectures, cells, of_library, read_ending, run_cells
from survey_page import BEGIN, END, at_parity, tables, write

from meshwright.runtime.template import Template

SAMPLE = 6


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        every = cells()
        if not metafunc.config.getoption("--every-row"):
            every = Random(of_library()).sample(every, SAMPLE)
        metafunc.parametrize("cell", every, ids=str)


def test_a_cell_is_at_parity_or_refused(cell: Cell, template: Template) -> None:
    ((_, outcome),) = run_cells([cell], template)
    assert outcome.kind in GOOD, f"{' '.join(cell.command)}: {outcome.kind}: {outcome.words}"
    if (cell.architecture.name, cell.plan) in at_parity():
        assert outcome.kind == "parity", f"{' '.join(cell.command)} was at parity, and is refused: {outcome.words}"


FAILS = "the model runs in one process, but under pp 2 it raises KeyError: 'a' (file.py:3)"


@pytest.mark.parametrize(
    ("code", "out", "err", "kind", "words"),
    [
        (0, json.dumps({"ok": True, "first_difference": None}), "parity holds", "parity", ""),
        (1, json.dumps({"ok": False, "first_difference": "step 0: loss"}), "parity FAILS", "wrong", "step 0: loss"),
        (2, "", "a warning\nerror: tp=2 does not divide 3: use tp=3\n", "refused", "tp=2 does not divide 3: use tp=3"),
        (2, "", "error: rank 1 of 2 failed: no block: name one\n", "refused", "no block: name one"),
        (1, "", "error: rank 1 of 2 hangs: others have waited for 90 s\n  rank", "hang", "rank 1 of 2 hangs: others"),
        (1, "", "error: rank 0 of 2 failed: KeyError: 'a'\n  file.py:3", "traceback", "KeyError: 'a'"),
        (1, "", f"error: rank 1 of 2 failed: {FAILS}", "traceback", FAILS),
        (1, "", "Traceback (most recent call last):\n  File\nTypeError: no\n", "traceback", "TypeError: no"),
        (-9, "", "", "traceback", "ended with -9"),
    ],
)
def test_how_a_command_ended_is_read(code: int, out: str, err: str, kind: str, words: str) -> None:
    found, said = read_ending(code, out, err)
    assert found == kind
    assert said.startswith(words)


def test_a_file_in_the_folder_is_an_architecture(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "net.json").write_text("{}")
    (tmp_path / "alone.json").write_text("{}")
    (tmp_path / "mine" / "nets.py").write_text(
        "def one(): ...\ndef _helper(): ...\ndef of(width): ...\ndef two(): ...\n"
    )
    found = architectures(tmp_path)
    assert [one.name for one in found] == ["alone", "net", "one", "two"]
    assert {one.group for one in found[1:]} == {"mine"}
    assert found[1].model == f"hf:{tmp_path}/mine/net.json"
    assert found[2].model == f"{tmp_path}/mine/nets.py:one"


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    for group in ("a", "b"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "net.json").write_text("{}")
    with pytest.raises(ValueError, match="net"):
        architectures(tmp_path)


def test_the_page_tells_what_was_at_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_page, "PAGE", tmp_path / "survey.md")
    (tmp_path / "survey.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    one, two = architectures()[:2]
    write(
        tables(
            [one, two], {one.name: {"tp2": ("parity", ""), "pp2": ("refused", "why")}, two.name: {"tp2": ("hang", "x")}}
        )
    )
    assert at_parity() == {(one.name, "tp2")}
    text = (tmp_path / "survey.md").read_text()
    assert "1 parity (8%)" in text
    assert "1 hang" in text
    assert "1. why" in text
    assert text.endswith("after\n")
