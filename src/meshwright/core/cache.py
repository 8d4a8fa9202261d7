"""Where measured clusters, captured graphs and compiled kernels are kept from one command to the next."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
