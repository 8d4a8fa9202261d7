"""The files that lie beside a run's checkpoints: one that is damaged does not keep whole checkpoints from being resumed.

    settings.toml, plan.json        those of the newest checkpoint take their place
    metrics.jsonl                   its good lines are kept
    all others                      are written anew, or done without

What is damaged is named and moved aside, never removed. A last line that a crash cut off is no damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.bounds import LARGEST_RECORD_BYTES, LONGEST_LINE_BYTES
from meshwright.core.cluster import Cluster
from meshwright.core.codec import Value, write_whole
from meshwright.core.errors import CheckpointError, InputError
from meshwright.core.estimate import Estimate
from meshwright.core.files.disk import free_name
from meshwright.core.files.given_file import given_lines, open_given, read_given
from meshwright.core.plan import Plan
from meshwright.core.result import SearchResult
from meshwright.core.run.trace import Forecast, Trace
from meshwright.training.folder import RunFolder
from meshwright.training.kept import all_of
from meshwright.training.manifest import read_listed, read_manifest
from meshwright.training.metrics import parse_line
from meshwright.training.run_id import RunId
from meshwright.training.settings import Settings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Damage:
    path: Path
    words: str


def mend(folder: RunFolder, say: Say) -> None:
    """To be called by who holds the folder, before a run goes on there. say: told what was found, and what was done."""
    for damage in damages(folder):
        try:
            instead = _mend(folder, damage)
        except OSError as error:
            raise InputError(
                f"{damage.path} is damaged ({damage.words}), and cannot be put right: {error.strerror}"
            ) from error
        say(f"warning: {damage.path} is damaged: {damage.words}; {instead}")


def damages(folder: RunFolder) -> list[Damage]:
    """In a folder with checkpoints; others are not looked at."""
    return [*_wrong_values(folder), *_wrong_kinds(folder), *_wrong_lines(folder)] if all_of(folder.checkpoints) else []


def good_lines(path: Path) -> tuple[list[bytes], str]:
    """Of metrics, each with its end; and what is wrong with the first that is not good, empty where all are."""
    with open_given(path) as file:
        lines = list(given_lines(file))
    good = [line for line in lines if _is_good(line)]
    is_cut = bool(lines) and len(lines[-1]) < LONGEST_LINE_BYTES and not lines[-1].endswith(b"\n")
    whole = lines[:-1] if is_cut else lines
    first = next((number for number, line in enumerate(whole, 1) if not _is_good(line)), None)
    return good, "" if first is None else f"line {first} is not what a step leaves"


def _is_good(line: bytes) -> bool:
    try:
        parse_line(line)
    except InputError:
        return False
    return line.endswith(b"\n")


def _wrong_values(folder: RunFolder) -> Iterator[Damage]:
    """Files of one value each."""
    kinds: dict[Path, type[Value]] = {
        folder.settings: Settings, folder.plan: Plan, folder.estimate: Estimate, folder.cluster: Cluster,
        folder.forecast: Forecast, folder.search: SearchResult, folder.trace: Trace, folder.run_id: RunId,
    }  # fmt: skip
    for path, kind in kinds.items():
        if not _is_there(path):
            if path in (folder.settings, folder.plan):
                yield Damage(path, "it is gone")
            continue
        try:
            kind.load(path)
        except InputError as error:
            yield Damage(path, str(error).removeprefix(f"{path}: "))


def _wrong_kinds(folder: RunFolder) -> Iterator[Damage]:
    """A file in place of a folder, a folder in place of a file, and bytes that are no text."""
    for path in (folder.live, folder.traces, folder.tensorboard, folder.launch):
        if _is_there(path) and not path.is_dir():
            yield Damage(path, "it is no folder")
    for path in (folder.faults, folder.hang, folder.launchers):
        if _is_there(path) and (words := _unreadable(path)):
            yield Damage(path, words)


def _unreadable(path: Path) -> str:
    try:
        read_given(path, LARGEST_RECORD_BYTES)
    except InputError as error:
        return str(error)
    return ""


def _wrong_lines(folder: RunFolder) -> Iterator[Damage]:
    if not _is_there(folder.metrics):
        return
    try:
        _, words = good_lines(folder.metrics)
    except InputError as error:
        words = str(error).removeprefix(f"{folder.metrics}: ")
    if words:
        yield Damage(folder.metrics, words)


def _mend(folder: RunFolder, damage: Damage) -> str:
    """What was done, in words."""
    path = damage.path
    kept = _kept_lines(path) if path == folder.metrics else []
    moved = f"it is now {_aside(path).name}, and " if _is_there(path) else ""
    if path == folder.metrics:
        write_whole(path, b"".join(kept).decode())
        return f"{moved}its {len(kept)} good lines are kept"
    if path in (folder.settings, folder.plan):
        return f"{moved}that of {_restored(folder, path)} takes its place"
    return f"{moved}the run goes on without it"


def _kept_lines(path: Path) -> list[bytes]:
    """None where the file cannot be read at all."""
    try:
        return good_lines(path)[0]
    except InputError:
        return []


def _is_there(path: Path) -> bool:
    """Links that lead to themselves are there, and in the way; `Path.exists` does not see them."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _aside(path: Path) -> Path:
    return path.rename(free_name(path.with_name(f"{path.name}.damaged")))


def _restored(folder: RunFolder, path: Path) -> str:
    """From the newest checkpoint that has it; its name."""
    kind: type[Value] = Settings if path == folder.settings else Plan
    for checkpoint in reversed(all_of(folder.checkpoints)):
        where = str(checkpoint / path.name)
        try:
            text = read_listed(checkpoint, read_manifest(checkpoint), path.name)
            value = kind.from_toml(text.decode(), where) if path.suffix == ".toml" else kind.from_json(text, where)
            value.save(path)
        except (InputError, CheckpointError, UnicodeDecodeError):
            continue
        return checkpoint.name
    raise InputError(f"{path} is damaged, and no checkpoint has a copy of it: start the run without --resume")
