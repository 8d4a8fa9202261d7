"""Where measured clusters, captured graphs and compiled kernels are kept from one command to the next.

What is loaded as code (a compiled kernel) must be a file that only this user, or the administrator, can have put there: whoever can
write it, or a folder on the way to it, decides what runs.                                               -> distrust
torch.compile takes `torchinductor_USER` in the temporary folder, a name that every user of the machine knows and can make first,
and loads what it finds there. Where others could write it, a folder of our own cache takes its place.  -> use_own_compile_cache
"""

from __future__ import annotations

import getpass
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from meshwright.core.bounds import LARGEST_RECORD_BYTES
from meshwright.core.codec import T, write_whole
from meshwright.core.errors import InputError, RunError
from meshwright.core.files.given_file import read_given


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def content_of(path: Path) -> str:
    """A text file, as part of what a cached answer depends on; empty where it cannot be read."""
    try:
        return read_given(path, LARGEST_RECORD_BYTES)
    except InputError:
        return ""


def version_of(package: str) -> str:
    """Empty where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


ADMINISTRATOR = 0


def distrust(path: Path) -> str | None:
    """Why others could have written it, in words; None where they could not. Of a file that is not there, its folders count."""
    for place in _on_the_way(path):
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be looked at ({error.strerror})"
        if problem := _problem(found):
            return f"{place} {problem}"
    return None


def _on_the_way(path: Path) -> Iterator[Path]:
    """The path and all its folders, as it is given and where its links lead; the outermost first."""
    given, real = path.absolute(), path.resolve()
    for one in (given,) if given == real else (given, real):
        yield from reversed(one.parents)
        yield one


def _problem(found: os.stat_result) -> str | None:
    if found.st_uid not in (os.getuid(), ADMINISTRATOR):
        return f"belongs to another user (number {found.st_uid})"
    if stat.S_ISLNK(found.st_mode):
        return None  # its mode means nothing; what it leads to is looked at
    is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if is_shared and not is_sticky:  # in a sticky folder, as /tmp is, others cannot replace what is there
        return f"can be written by others than its owner (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


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


def read_kept(path: Path, kind: type[T]) -> T | None:
    """A cached value; None where there is none, or its file was cut short or has another content: it is then made again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def keep(path: Path, value: object) -> None:
    """A cache that cannot be written is not worth failing for."""
    with suppress(OSError, InputError):
        write_whole(path, msgspec.json.encode(value).decode())
