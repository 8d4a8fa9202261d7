"""The file a plan is saved in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.core.plan import Plan

SUFFIXES = (".json", ".toml")


def check_plan_file(file: str) -> None:
    """Before anything is searched for it."""
    from meshwright.core.errors import InputError

    if Path(file).suffix not in SUFFIXES:
        raise InputError(f"-o {file}: a plan is saved as {' or '.join(SUFFIXES)}")
    if Path(file).is_dir():
        raise InputError(f"-o {file}: is a folder: name a file in it")


def save_plan(plan: Plan, file: str) -> Path:
    from meshwright.core.errors import InputError

    try:
        return plan.save(file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from error
