"""`make survey`: run the survey's cells, print what they came to, and write docs/survey.md.

    python tests/cpu/survey.py [--only "swin pp2"] [--kinds traceback,wrong] [--again] [--at-once 2] [--no-write] [--folder DIR]

What a cell came to is kept in runs/survey.json as it ends, with a hash of src/ and of the architecture's file: a run that was cut
goes on where it was, and only cells that are missing or stale are run. The exit code is 1 where a cell is wrong, ends in a
traceback or hangs. Architectures of another folder are run and printed alike; what they came to is kept in DIR/.survey-results, and
the page is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from forked import command_template
from survey_cells import FOLDER, ROOT, Architecture, Cell, Outcome, architectures, cells, run_cells, stamp
from survey_page import KINDS, Found, bad, tables, write

KEPT = ROOT / "runs" / "survey.json"
RESULTS = ".survey-results"
"""In another folder; no architecture is called so."""


def main() -> int:
    asked = _arguments()
    every, is_ours = architectures(asked.folder), asked.folder == FOLDER
    stamps = {one.name: stamp(one) for one in every}
    kept = Kept(KEPT if is_ours else asked.folder / RESULTS)
    todo = [cell for cell in cells(asked.folder) if _is_asked(cell, asked, kept, stamps)]
    _run(todo, asked.at_once, kept, stamps)
    found = kept.found(every)
    page = tables(every, found)
    print(page)
    if is_ours and not asked.no_write:
        write(page)
    stale = sum(not kept.is_fresh(cell, stamps) for cell in cells(asked.folder))
    if stale:
        print(f"{stale} cells are stale or were not run: run again without --only to fill them", file=sys.stderr)
    wrong = bad(found)
    print("\n".join(wrong) or "every cell that was run is at parity or refused", file=sys.stderr)
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells with all these words in group, name or plan, like 'swin pp2'")
    parser.add_argument("--kinds", default="", help=f"cells that came to one of {','.join(KINDS)} before")
    parser.add_argument("--again", action="store_true", help="also cells that are up to date")
    parser.add_argument("--at-once", type=int, default=2, help="cells that run side by side")
    parser.add_argument("--folder", type=lambda name: Path(name).resolve(), default=FOLDER, help="other architectures")
    parser.add_argument("--no-write", action="store_true", help="leave docs/survey.md as it is")
    return parser.parse_args()


def _is_asked(cell: Cell, asked: argparse.Namespace, kept: Kept, stamps: dict[str, str]) -> bool:
    names = f"{cell.architecture.group} {cell.architecture.name} {cell.plan}"
    if not all(word in names for word in asked.only.split()):
        return False
    if asked.kinds and kept.kind(cell) not in asked.kinds.split(","):
        return False
    return asked.again or not kept.is_fresh(cell, stamps)


def _run(todo: list[Cell], at_once: int, kept: Kept, stamps: dict[str, str]) -> None:
    if not todo:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: cells side by side share the cores
    started, used = time.monotonic(), 0.0
    with command_template() as template:
        for number, (cell, outcome) in enumerate(run_cells(todo, template, at_once), start=1):
            kept.keep(cell, outcome, stamps[cell.architecture.name])
            used += outcome.seconds
            words = f"{outcome.kind}{': ' if outcome.words else ''}{outcome.words}"
            print(f"{number} of {len(todo)}: {cell}: {words} ({outcome.seconds:.1f} s)", file=sys.stderr, flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"{len(todo)} cells in {minutes:.1f} minutes, {used / 60:.1f} minutes of processors", file=sys.stderr)


class Kept:
    """What cells came to, in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def keep(self, cell: Cell, outcome: Outcome, of: str) -> None:
        """The file is read anew: another run may fill other cells."""
        self.rows = Kept(self.file).rows
        row = {"kind": outcome.kind, "words": outcome.words, "seconds": outcome.seconds, "stamp": of}
        self.rows.setdefault(cell.architecture.name, {})[cell.plan] = row
        self.file.parent.mkdir(exist_ok=True)
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(self.rows, indent=1))
        draft.replace(self.file)

    def is_fresh(self, cell: Cell, stamps: dict[str, str]) -> bool:
        return self._row(cell).get("stamp") == stamps[cell.architecture.name]

    def kind(self, cell: Cell) -> str:
        return str(self._row(cell).get("kind", "not run"))

    def found(self, every: list[Architecture]) -> Found:
        """Of architectures that are still there."""
        names = {one.name for one in every}
        return {
            name: {plan: (row["kind"], row["words"]) for plan, row in rows.items()}
            for name, rows in self.rows.items()
            if name in names
        }

    def _row(self, cell: Cell) -> dict[str, Any]:
        return dict(self.rows.get(cell.architecture.name, {}).get(cell.plan, {}))


if __name__ == "__main__":
    sys.exit(main())
