"""Temporary folders that do not pile up: one whose process was killed goes at the next start of any command of the same user.

Each names the process it is of (`owner.json`). Ranks make theirs inside their launcher's, which goes when the launcher ends them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.runtime.process import Process, process_of, seen

PREFIX = "meshwright-"
OWNER = "owner.json"
PARENT = "MESHWRIGHT_TEMPORARY"
"""Where a rank makes its own."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    parent = os.environ.get(PARENT)
    if parent is None or not Path(parent).is_dir():
        parent = tempfile.gettempdir()
        clear_abandoned(Path(parent))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        with suppress(OSError):  # a disk that is full is the user's to name, not this file
            (Path(folder) / OWNER).write_text(process_of(os.getpid()).to_json(), encoding="utf-8")
        yield Path(folder)


def clear_abandoned(parent: Path) -> None:
    """Those of this user whose process has ended."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, InputError):
            if path.is_symlink() or path.stat().st_uid != os.getuid() or not (path / OWNER).is_file():
                continue
            if seen(Process.load(path / OWNER)) == "ended":
                shutil.rmtree(path, ignore_errors=True)
