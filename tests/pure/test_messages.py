"""What processes tell each other, by a look at the source: no pickles, and types that are known when a message comes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

SOURCE = Path(meshwright.__file__).parent
PICKLING = {
    "runtime/_torch_distributed.py": "what this process' own rendezvous has pickled, and what is handed back to it",
    "measure/checking/live.py": "a user's module, in a folder that nobody else can write",
}
EXCHANGES = ("all_ranks", "from_first")


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes: ast.AST) -> set[str]:
    found = [node for node in ast.walk(nodes) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name.asname or name.name for node in found for name in node.names}


def test_who_may_pickle() -> None:
    assert {name for name, tree in trees() if {"pickle", "cloudpickle"} & imported(tree)} == set(PICKLING)


@pytest.mark.parametrize("ending", ["_object", "_object_list"])
def test_no_collective_of_objects(ending: str) -> None:
    """torch's exchange of objects pickles them; distributed checkpoints' own save and load do the same."""
    for name, tree in trees():
        calls = [
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        assert not [
            call
            for call in calls
            if call.endswith(ending) and call.startswith(("all_", "gather", "broad", "scat", "send", "recv"))
        ], name
        assert "torch.distributed.checkpoint" not in imported(tree), name


def test_types_of_messages_are_known_at_run_time() -> None:
    """A type that is imported for the type checker alone is no type when a message comes."""
    seen = 0
    for name, tree in trees():
        guards = [
            node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        ]
        guarded = set().union(*(imported(guard) for guard in guards))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            known = imported(function)
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                if getattr(call.func, "id", "") in EXCHANGES:
                    seen += 1
                    kinds = {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
                    assert not kinds & guarded - known, (name, call.lineno)
    assert seen > 10
