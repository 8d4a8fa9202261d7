"""The user's own Python files: `path/to/file.py:function`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.core.errors import InputError, ModelError, nearest
from meshwright.models.seeded import seeded

IMPORT_SEED = 0
"""A file that builds a module when it is imported builds the same one on every rank."""


def call_function(name: str, *arguments: Any) -> Any:
    """Call `path/to/file.py:function`. What it raises is shown with the user's own line."""
    path, function = split_name(name)
    module = import_file(path)
    if not callable(getattr(module, function, None)):
        public = [word for word, item in vars(module).items() if callable(item) and not word.startswith("_")]
        raise InputError(f"{path} has no function '{function}': {nearest(function, public)}")
    try:
        return getattr(module, function)(*arguments)
    except Exception as error:
        raise ModelError(f"{name} raised {type(error).__name__}: {error}{user_line(error, path)}") from error


def split_name(name: str) -> tuple[Path, str]:
    text, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        raise InputError(f"'{name}' names no function: write path/to/file.py:function")
    path = Path(text)
    if not path.is_file():
        raise InputError(f"{path}: no such file (looked in {Path.cwd()})")
    return path, function


def import_file(path: Path) -> ModuleType:
    """Run the file as a module of its own; its folder can be imported from, as when it is run as a script."""
    module_name = f"meshwright_user_{path.stem}_{abs(hash(path.resolve()))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        with seeded(IMPORT_SEED):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ModelError(f"{path} raised {type(error).__name__}: {error}{user_line(error, path)}") from error
    return module


def user_line(error: BaseException, path: Path) -> str:
    """` (line 12: return GPT(hiden=8))`: the last frame inside the user's file."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f" (line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
