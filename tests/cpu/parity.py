"""`make parity`: fill the whole parity table, print it, and write it into docs/parity.md between its markers.

    python tests/cpu/parity.py [--models gpt,moe] [--only tp2] [--ranks 2,4] [--no-write]

Cells that were filled before are kept in runs/parity.json and shown with the rest; those that are asked for are run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from cases import ROOT
from pool import RankPool
from table import MODELS, ROWS, Cell, Row, fill

KEPT = ROOT / "runs" / "parity.json"
PAGE = ROOT / "docs" / "parity.md"
BEGIN, END = "<!-- parity table: begin -->", "<!-- parity table: end -->"

Filled = dict[str, dict[str, str]]
"""Row → model → what its cell shows."""


def main() -> int:
    asked = _arguments()
    models = asked.models.split(",") if asked.models else list(MODELS)
    sizes = [int(size) for size in asked.ranks.split(",")]
    rows = [row for row in ROWS if asked.only in str(row) and row.num_ranks in sizes]
    wrong = _run(rows, models)
    table = _markdown(kept())
    print(table)
    if not asked.no_write:
        _write(table)
    print("\n".join(wrong) or "every cell that was run agrees with one process", file=sys.stderr)
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--only", default="", help="rows whose name holds this, like 'cp2' or 'pp2 zb'")
    parser.add_argument("--ranks", default="2,4,8", help="rows of these numbers of processes")
    parser.add_argument("--no-write", action="store_true", help="leave docs/parity.md as it is")
    return parser.parse_args()


def _run(rows: list[Row], models: list[str]) -> list[str]:
    """Fill the cells; what is wrong, in words."""
    wrong: list[str] = []
    for size in sorted({row.num_ranks for row in rows}):
        ranks = RankPool(size)
        for model in models:
            for row in (row for row in rows if row.num_ranks == size):
                started = time.monotonic()
                cell = fill(ranks, model, row)
                print(
                    f"{model}, {row}: {shown(cell)} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True
                )
                wrong += [] if cell.ok else [f"{model}, {row}: {cell.wrong}"]
                _keep(str(row), model, shown(cell))
        ranks.close()
    return wrong


def kept() -> Filled:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}  # type: ignore[no-any-return]


def _keep(row: str, model: str, words: str) -> None:
    """Read anew each time: another run may fill other cells."""
    filled = kept()
    filled.setdefault(row, {})[model] = words
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(filled, indent=1))


def shown(cell: Cell) -> str:
    if cell.refused:
        return f"refused: {cell.refused}".replace(f"{ROOT}/", "")
    if not cell.ok:
        return f"WRONG: {cell.wrong}".replace(f"{ROOT}/", "")
    assert cell.result is not None
    return f"{cell.result.max_gradient_difference:.0e}"


def _markdown(filled: Filled) -> str:
    """Reasons of refusals are numbered, and stand below the table."""
    reasons: dict[str, int] = {}
    lines = [f"| processes | plan | {' | '.join(MODELS)} |", f"| ---: | --- |{' ---: |' * len(MODELS)}"]
    for row in ROWS:
        cells = [_short(filled.get(str(row), {}).get(model, "not run"), reasons) for model in MODELS]
        lines.append(f"| {row.num_ranks} | {row} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", "Refused, or wrong:", "", *notes] if notes else lines)


def _short(words: str, reasons: dict[str, int]) -> str:
    kind, colon, reason = words.partition(": ")
    if not colon:
        return words
    number = reasons.setdefault(reason if kind == "refused" else words, len(reasons) + 1)
    return f"({number})" if kind == "refused" else f"**wrong** ({number})"


def _write(table: str) -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
