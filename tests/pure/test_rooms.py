"""Public names: each is what it says, whatever was imported before."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import meshwright as mw

ROOMS = {module.name for module in pkgutil.iter_modules(mw.__path__)}


def test_no_room_has_the_name_of_a_public_function() -> None:
    assert not ROOMS & set(mw.__all__)


@pytest.mark.parametrize("name", [name for name in mw.__all__ if not name.startswith("_")])
def test_a_public_name_is_the_same_after_every_import(name: str) -> None:
    before = getattr(mw, name)
    for room in ("capturing.capture", "searching.search", "measure.probe", "training.settings"):
        importlib.import_module(f"meshwright.{room}")
    assert getattr(mw, name) is before
