"""Checks that were passed: remembered in the cache folder by the model's graph, its code and the small plan."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.codec import stable_hash
from meshwright.core.files.cache import cache_folder, content_of, version_of
from meshwright.core.model_name import config_file

CHECK_VERSION = 1
"""Raised when a check finds more than before: what passed is then compared again."""
MOST_FILES = 300
"""Python files beside the user's that are looked at: what the model imports from there may have changed."""


class Kept:
    def __init__(self, code: str) -> None:
        """code: changes when the model's own code does."""
        versions = [version_of(package) for package in ("meshwright", "torch", "transformers")]
        self.facts = [code, *versions, _own_code(), CHECK_VERSION]

    def has(self, graph: str, plan: str) -> bool:
        return self._file(graph, plan).exists()

    def add(self, graph: str, plan: str) -> None:
        path = self._file(graph, plan)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError:
            return  # a cache that cannot be written is not worth failing for

    def _file(self, graph: str, plan: str) -> Path:
        return cache_folder() / "checks" / stable_hash([*self.facts, graph, plan])


def code_of(model: str) -> str:
    """Of a model's name: the file it names, and what lies beside it."""
    path = Path(model.rpartition(":")[0]) if ".py:" in model else config_file(model)
    beside = sorted(path.parent.glob("*.py"))[:MOST_FILES] if path.suffix == ".py" else []
    return stable_hash([model, *(f"{file.name}:{content_of(file)}" for file in [path, *beside])])


def _own_code() -> str:
    """Of Meshwright, where it is changed in place between two versions."""
    files = sorted(Path(__file__).parents[2].rglob("*.py"))
    return stable_hash([f"{file.name}:{file.stat().st_mtime_ns}:{file.stat().st_size}" for file in files])
