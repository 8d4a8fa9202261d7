"""Where torch.compile keeps what it compiles: a folder that nobody else can have filled.

torch takes `torchinductor_USER` in the temporary folder, a name that every user of the machine knows and can make first, and loads
what it finds there. Where others could write it, a folder of our own cache takes its place.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
import warnings
from pathlib import Path

from meshwright.core.errors import RunError
from meshwright.core.files.cache import cache_folder
from meshwright.core.files.trusted import distrust

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_own_compile_cache() -> None:
    """Before something is compiled. A folder that the user names is the user's choice."""
    if os.environ.get(VARIABLE):
        return
    danger = distrust(usual_folder())
    if danger is None:
        return
    own = cache_folder() / "inductor"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := distrust(own):
        raise RunError(
            f"neither {usual_folder()} nor {own} is safe to load compiled code from: {danger}; {problem}: correct their owner and "
            f"mode (chmod go-w), or name another folder with {VARIABLE}"
        )
    os.environ[VARIABLE] = str(own)
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(f"compiled code is kept in {own}, since {danger}", RuntimeWarning, stacklevel=2)


def usual_folder() -> Path:
    """As torch names it."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"
