"""Rooms that share their name with a public function: `mw.capture(...)` and `mw.search(...)` are calls, and
`meshwright.capture.trace` is a module. Importing a room puts it on the package under that name, so the room itself can be
called and passes the call on. See docs/decisions/0008-callable-rooms.md.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        function = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module("meshwright._api"), function)(*arguments, **options)


def make_callable(room: str) -> None:
    sys.modules[room].__class__ = CallableRoom
