"""Whether a checkpoint is what was written: its files by the manifest, and what they say of each other.

All of this is looked at before a program changes. What is wrong here is damage (`DamagedError`): an older checkpoint may be whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.core.errors import InputError
from meshwright.training.checked.tensors import DELAYED, DELAYED_PARAMETERS, RANDOM, SCALE, check_tensors
from meshwright.training.contents import MODEL, SETTINGS, STATE, Contents, read_contents, with_settings, with_state
from meshwright.training.kept import step_of
from meshwright.training.manifest import DamagedError, Manifest, check_files, read_manifest
from meshwright.training.position import Progress, check_format, read_progress

SCALE_NAMES = frozenset((f"{SCALE}scale", f"{SCALE}num_good_steps"))
KNOWN = (MODEL, STATE, SETTINGS, RANDOM, DELAYED)
CPU = "cpu"


@dataclass(frozen=True)
class Whole:
    """A checkpoint that was looked at."""

    path: Path
    progress: Progress
    contents: Contents


def check_whole(path: Path, number: int, num_ranks: int) -> Whole:
    """Raises where it is not. Each of so many ranks looks at its share of the large files, and at all that is small."""
    check_format(path)
    manifest = read_manifest(path)
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size_bytes, name))
    share = names[number::num_ranks]
    check_files(path, manifest, share)
    progress, contents = _read(path, manifest)
    for problem in (*_places(path, progress), *_names(contents, progress), *_optimizer(contents)):
        raise DamagedError(f"{path}: {problem}")
    check_tensors(path, contents, frozenset(share))
    return Whole(path, progress, contents)


def _read(path: Path, manifest: Manifest) -> tuple[Progress, Contents]:
    try:
        return read_progress(path, manifest), read_contents(path, manifest)
    except InputError as error:
        raise DamagedError(str(error)) from error


def _places(path: Path, progress: Progress) -> Iterator[str]:
    if step_of(path) != progress.step:
        yield f"its name says step {step_of(path)}, its progress step {progress.step}"


def _names(contents: Contents, progress: Progress) -> Iterator[str]:
    """Each name is one that a checkpoint has, and each rank's random state is there."""
    for name in (*contents.tensors, *contents.values):
        if not name.startswith(KNOWN) and name not in SCALE_NAMES:
            yield f"it holds '{name}', which is part of no checkpoint"
    drawn = [name.removeprefix(RANDOM) for name in contents.tensors if name.startswith(RANDOM)]
    kinds = {CPU, *(name.partition(".")[2] for name in drawn)}
    expected = {f"{rank}.{kind}" for rank in range(min(progress.num_ranks, len(drawn) + 1)) for kind in kinds}
    for name in sorted(expected - set(drawn)):
        yield f"it lacks the random state '{RANDOM}{name}' of {progress.num_ranks} ranks"
    for name in sorted(set(drawn) - expected):
        yield f"it holds the random state '{RANDOM}{name}', and is of {progress.num_ranks} ranks"
    for name in contents.tensors:
        parameter = f"{MODEL}{name.removeprefix(DELAYED_PARAMETERS)}"
        if name.startswith(DELAYED_PARAMETERS) and parameter not in contents.tensors:
            yield f"it lacks '{parameter}', of which it holds what a late update left ('{name}')"
    if scale := SCALE_NAMES & {*contents.tensors, *contents.values}:
        yield from (f"it lacks '{name}'" for name in sorted(SCALE_NAMES - scale))


def _optimizer(contents: Contents) -> Iterator[str]:
    """What the optimizer kept is there for all but those it kept nothing for; and settings are what an optimizer takes."""
    updated, kept = with_settings(contents.values), with_state((*contents.tensors, *contents.values))
    for name in sorted(kept | updated):
        if f"{MODEL}{name}" not in contents.tensors:
            yield f"it lacks parameter '{name}', which an optimizer updated"
        elif name not in updated:
            yield f"it lacks the optimizer's settings of '{name}'"
        elif contents.stateless is not None and (name in kept) == (name in contents.stateless):
            word = "holds optimizer state of" if name in kept else "lacks the optimizer state of"
            yield f"it {word} '{name}', which is not what was written down"
    for name in sorted(updated):
        yield from _settings(name, contents.values[f"{SETTINGS}{name}"])


def _settings(name: str, found: Any) -> Iterator[str]:
    """A list of pairs; numbers in the range that every optimizer has them in."""
    is_pairs = isinstance(found, list) and all(
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) for one in found
    )
    if not is_pairs or len({key for key, _ in found}) < len(found):
        yield f"the optimizer's settings of '{name}' are no list of names and values"
        return
    options = dict(found)
    if "params" in options:
        yield f"the optimizer's settings of '{name}' name parameters"
    rate: Any = options.get("lr")
    if "lr" in options and not (_is_number(rate) and isfinite(rate) and rate >= 0):
        yield f"the learning rate of '{name}' is {rate!r}"
    betas: Any = options.get("betas", [])
    if not isinstance(betas, list) or not all(_is_number(beta) and 0 <= beta <= 1 for beta in betas):
        yield f"the betas of '{name}' are {betas!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
