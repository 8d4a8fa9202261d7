"""The checkpoints of a run in their folder: `step-00000200`, and what is being written, replaced or set aside.

    .step-00000200.draft     being written; never read
    step-00000200            whole: its manifest is the last file that is written, the rename comes after
    .step-00000200.old       gives way to one of the same step; it counts as long as that one is not there
    .step-00000200.gone      being removed
    step-00000200.damaged    found to be other than it was written; never read again, never removed

The newest is the one of the highest step: clocks play no part. A run may keep some in another place (`places.py`).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from meshwright.core.files.disk import free_name, rename
from meshwright.training import manifest
from meshwright.training.position import format_of

_NAME = re.compile(r"step-(\d+)")
_OLD = re.compile(r"\.(step-\d+)\.old")
_DRAFT = re.compile(r"\.step-\d+\.draft")
_GONE = re.compile(r"\.step-\d+\.gone")
Where = Path | tuple[Path, ...]
"""The folder of a run's checkpoints, or several; of two checkpoints of one step, that in the first counts."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def draft_of(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}.draft"


def latest(where: Where) -> Path | None:
    """The newest checkpoint."""
    found = all_of(where)
    return found[-1] if found else None


def all_of(where: Where) -> list[Path]:
    """Oldest first. Those of format 1 have no manifest: they are found, so that they can be refused by name."""
    if isinstance(where, Path):
        return _all_in(where)
    found = {step_of(path): path for folder in reversed(where) for path in _all_in(folder)}
    return sorted(found.values(), key=step_of)


def _all_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = {path.name: path for path in folder.iterdir() if _NAME.fullmatch(path.name) and _is_whole(path)}
    for path in folder.iterdir():
        aside = _OLD.fullmatch(path.name)
        if aside and aside[1] not in found and _is_whole(path):
            found[aside[1]] = path
    return sorted(found.values(), key=step_of)


def step_of(path: Path) -> int:
    match = _NAME.search(path.name)
    assert match is not None
    return int(match[1])


def publish(draft: Path, keep: int) -> None:
    """The draft becomes the checkpoint; older ones go only after that."""
    target = draft.with_name(draft.name.removeprefix(".").removesuffix(".draft"))
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        remove(old)
        rename(target, old)
    rename(draft, target)
    remove(old)
    for path in all_of(target.parent)[:-keep]:
        remove(path)


def clear_drafts(folder: Path) -> None:
    """What a crash has left of one that was being written, or removed."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _DRAFT.fullmatch(path.name) or _GONE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def clear_left(folder: Path) -> None:
    """All that earlier starts of a run have left behind; to be called while nobody writes."""
    clear_drafts(folder)
    newest = latest(folder)
    if newest is None:
        return
    for path in folder.iterdir():
        old, half = _OLD.fullmatch(path.name), _NAME.fullmatch(path.name) and not _is_whole(path)
        if (old and (path.parent / old[1] / manifest.FILE).is_file()) or (half and step_of(path) < step_of(newest)):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """A damaged one, under a name that nothing reads."""
    target = free_name(path.with_name(f"{name_of(step_of(path))}.damaged"))
    rename(path, target)
    return target


def remove(path: Path) -> None:
    """First of all it is no checkpoint any more: one that is half removed must not be taken for one, nor stay."""
    gone = path.with_name(f".{name_of(step_of(path))}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    return (path / manifest.FILE).is_file() or format_of(path) == 1
