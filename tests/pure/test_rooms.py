"""Public names: each is what it says, whatever was imported before."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright as mw

SOURCES = sorted(Path(mw.__path__[0]).rglob("*.py"))
ROOMS = {module.name for module in pkgutil.iter_modules(mw.__path__)}


def test_no_room_has_the_name_of_a_public_function() -> None:
    assert not ROOMS & set(mw.__all__)


@pytest.mark.parametrize("name", [name for name in mw.__all__ if not name.startswith("_")])
def test_a_public_name_is_the_same_after_every_import(name: str) -> None:
    before = getattr(mw, name)
    for room in ("capturing.capture", "searching.search", "measure.probe", "training.settings"):
        importlib.import_module(f"meshwright.{room}")
    assert getattr(mw, name) is before


def undocumented(source: Path) -> Iterator[str]:
    """Classes of values without a docstring of their own."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and not ast.get_docstring(node):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & {"Value", "Struct"}:
                yield f"{source.name}: {node.name}"


def test_every_value_says_what_it_is() -> None:
    assert [name for source in SOURCES for name in undocumented(source)] == []


def test_help_of_a_plan_names_its_fields() -> None:
    assert [
        name for name in mw.Plan.__struct_fields__ if name != "format" and name not in (mw.Plan.__doc__ or "")
    ] == []


def test_a_folder_has_at_most_two_dozen_files() -> None:
    """Folders that still have more must not grow."""
    known = {
        "runtime": 76, "runtime/offload": 30, "training": 52, "models": 42, "measure": 30,
        "report": 29,
    }  # fmt: skip
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {source.parent for source in SOURCES}}
    crowded = {str(folder.relative_to(mw.__path__[0])): count for folder, count in counts.items() if count > 24}
    assert all(count <= known.get(folder, 0) for folder, count in crowded.items()), crowded
