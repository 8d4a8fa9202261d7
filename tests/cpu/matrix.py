"""The matrix of plans that test_reshard.py leaves: saved by, resumed by, and how far the next losses are off."""

from __future__ import annotations

from typing import Any

Cell = tuple[str, str, str, float]


def matrix_lines(cells: list[Cell], chain: list[tuple[str, float]]) -> list[str]:
    """One table a model; columns are numbered, rows name the plans."""
    lines = []
    for model in dict.fromkeys(cell[0] for cell in cells):
        found = {(saved, resumed): off for name, saved, resumed, off in cells if name == model}
        plans = sorted({plan for pair in found for plan in pair})
        width = max(map(len, plans)) + 3
        lines += ["", f"{model}: largest relative difference of the next losses, saved by (row), resumed by (column)"]
        lines.append(" " * (width + 3) + "".join(f"[{number}]".rjust(7) for number in range(1, len(plans) + 1)))
        for number, saved in enumerate(plans, start=1):
            row = "".join(_cell(found.get((saved, resumed))).rjust(7) for resumed in plans)
            lines.append(f"[{number}]".rjust(4) + f" {saved}".ljust(width - 1) + row)
    if chain:
        lines += ["", "a chain: " + " → ".join(f"{name} ({_cell(off)})" for name, off in chain)]
    return lines


def recorded(reports: list[Any], name: str) -> list[Any]:
    return [value for report in reports for key, value in report.user_properties if key == name]


def _cell(off: float | None) -> str:
    if off is None:
        return "."
    return "0" if off == 0 else f"{off:.0e}"
