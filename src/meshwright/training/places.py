"""Where the checkpoints of a run are: in its folder, and where its settings name another place for those it does not take."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.training.folder import RunFolder
from meshwright.training.run_id import read_id
from meshwright.training.settings import Settings


def places_of(folder: RunFolder) -> tuple[Path, ...]:
    """By what the folder says of itself; home first."""
    try:
        elsewhere = elsewhere_of(Settings.load(folder.settings), folder, read_id(folder.path))
    except InputError:
        elsewhere = None
    return (folder.checkpoints,) if elsewhere is None else (folder.checkpoints, elsewhere)


def elsewhere_of(settings: Settings, folder: RunFolder, run: str) -> Path | None:
    """A folder of this run alone: several runs may name the same place."""
    place = settings.checkpoint.elsewhere
    return None if place is None else Path(place) / f"{folder.path.absolute().name}-{run or 'run'}"
