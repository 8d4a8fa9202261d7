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


@pytest.mark.parametrize(
    "name",
    ["Plan", "PlanRequest", "Recipe", "Estimate", "SearchResult", "Sweep", "FaultSettings", "Trace", "ParityResult"],
)
def test_help_of_a_value_names_its_fields(name: str) -> None:
    kind = getattr(mw, name)
    words = kind.__doc__ or ""
    seldom = {
        "format", "model", "cluster",  # said by their names
        "host_bytes", "reserved_bytes", "context_bytes", "rank", "num_ranks", "plan", "sampled_at", "environment",
        "num_tensors", "silenced",
    }  # fmt: skip
    assert [field for field in kind.__struct_fields__ if field not in words and field not in seldom] == []


def public_members(kind: type) -> Iterator[tuple[str, object]]:
    """Methods and properties that a class adds by itself."""
    for name, member in vars(kind).items():
        asked = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        if not name.startswith("_") and callable(asked):
            yield name, asked


@pytest.mark.parametrize("name", [name for name in mw.__all__ if name != "__version__"])
def test_help_teaches(name: str) -> None:
    found = getattr(mw, name)
    assert found.__doc__
    if isinstance(found, type):
        assert vars(found).get("__doc__")
        assert [member for member, asked in public_members(found) if not asked.__doc__] == []


def test_a_folder_has_at_most_two_dozen_files() -> None:
    """Folders that still have more must not grow."""
    known = {
        "runtime": 76, "runtime/offload": 30, "training": 52, "models": 42, "measure": 30,
        "report": 29,
    }  # fmt: skip
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {source.parent for source in SOURCES}}
    crowded = {str(folder.relative_to(mw.__path__[0])): count for folder, count in counts.items() if count > 24}
    assert all(count <= known.get(folder, 0) for folder, count in crowded.items()), crowded
