"""docs/survey.md: how many cells came to what, a row for each architecture, and the reasons below."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from survey_cells import GOOD, PLANS, ROOT, Architecture

PAGE = ROOT / "docs" / "survey.md"
BEGIN, END = "<!-- survey: begin -->", "<!-- survey: end -->"
NOT_RUN = "not run"
TEXTS = ("decoders", "encoders", "seq2seq", "state_space", "experts")
"""Groups whose models look up tokens."""
KINDS = ("parity", "refused", "wrong", "traceback", "hang", NOT_RUN)

Found = dict[str, dict[str, tuple[str, str]]]
"""Architecture → plan → outcome and its reason."""


def tables(every: Sequence[Architecture], found: Found) -> str:
    reasons: dict[str, int] = {}
    rows = [_row(architecture, found, reasons) for architecture in every]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    head = [f"| group | architecture | {' | '.join(PLANS)} |", f"| --- | --- |{' --- |' * len(PLANS)}"]
    said = ["", "Reasons:", "", *notes] if notes else []
    return "\n".join([*_summary(every, found), "", *head, *rows, *said])


def _row(architecture: Architecture, found: Found, reasons: dict[str, int]) -> str:
    shown = [_shown(*_outcome(found, architecture, plan), reasons) for plan in PLANS]
    return f"| {architecture.group.replace('_', ' ')} | {architecture.name} | {' | '.join(shown)} |"


def _shown(kind: str, words: str, reasons: dict[str, int]) -> str:
    if kind in ("parity", NOT_RUN):
        return kind
    number = reasons.setdefault(words, len(reasons) + 1)
    return f"({number})" if kind == "refused" else f"**{kind}** ({number})"


def _outcome(found: Found, architecture: Architecture, plan: str) -> tuple[str, str]:
    return found.get(architecture.name, {}).get(plan, (NOT_RUN, ""))


def _summary(every: Sequence[Architecture], found: Found) -> list[str]:
    """Cells at parity by group and plan, then all cells by what they came to."""
    lines = [f"| at parity | {' | '.join(PLANS)} | all |", f"| --- |{' ---: |' * (len(PLANS) + 1)}"]
    groups = list(dict.fromkeys(architecture.group for architecture in every))
    for group in groups:
        lines.append(_of_group(group.replace("_", " "), [one for one in every if one.group == group], found))
    configs = [one for one in every if one.file.suffix == ".json"]
    lines.append(_of_group("**Hugging Face configs**", configs, found))
    texts = [one for one in configs if one.group in TEXTS]
    lines.append(_of_group("**of them, of text** (cp cuts tokens)", texts, found))
    lines.append(_of_group("**all**", every, found))
    counts = Counter(_outcome(found, one, plan)[0] for one in every for plan in PLANS)
    total = sum(counts.values())
    words = [f"{counts[kind]} {kind} ({counts[kind] / max(total, 1):.0%})" for kind in KINDS if counts[kind]]
    return [*lines, "", f"{len(every)} architectures, {total} cells: {', '.join(words)}."]


def _of_group(name: str, members: Sequence[Architecture], found: Found) -> str:
    by_plan = {plan: [_outcome(found, one, plan)[0] for one in members] for plan in PLANS}
    together = [kind for kinds in by_plan.values() for kind in kinds]
    shown = [f"{kinds.count('parity')} of {len(kinds)}" for kinds in by_plan.values()]
    share = together.count("parity") / max(len(together), 1)
    return f"| {name} | {' | '.join(shown)} | {share:.0%} |"


def write(text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def at_parity() -> set[tuple[str, str]]:
    """(architecture, plan) of the cells that the page shows at parity."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    found = set[tuple[str, str]]()
    for line in re.findall(rf"^\|((?:[^|]+\|){{{len(PLANS) + 2}}})$", text, re.MULTILINE):
        _, name, *shown = [word.strip() for word in line.split("|")[:-1]]
        found |= {(name, plan) for plan, word in zip(PLANS, shown, strict=True) if word == "parity"}
    return found


def bad(found: Found) -> list[str]:
    """Cells that may not be, in words."""
    return [
        f"{name}, {plan}: {kind}: {words}"
        for name, row in found.items()
        for plan, (kind, words) in row.items()
        if kind not in GOOD
    ]
