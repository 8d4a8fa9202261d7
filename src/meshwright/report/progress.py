"""How far a search has come, in a line."""

from __future__ import annotations

from meshwright.core.progress import SearchProgress
from meshwright.core.units import format_seconds


def progress_words(progress: SearchProgress) -> str:
    words = f"searching {progress.stage}: {progress.num_costed} costed"
    if progress.best_seconds is None:
        return f"{words}, none fits so far"
    gap = "" if progress.gap is None else f", at most {progress.gap:.0%} from the fastest there is"
    return f"{words}, the best {format_seconds(progress.best_seconds)} a step{gap}"
