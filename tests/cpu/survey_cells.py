"""The survey's cells: every architecture of tests/survey under every plan, by `meshwright parity` as people start it.

An architecture is a file in tests/survey or in a folder of it, whose name is its group:

    NAME.json    a Hugging Face config                                          hf:NAME.json
    FILE.py      each public function without arguments is one, by its name     FILE.py:function

A cell ends as

    parity       loss, gradients and parameters are those of one process        exit code 0
    refused      an error of core/errors.py, with its reason                    exit code 2
    wrong        it ran, and something differs                                  exit code 1, and a result
    hang         a rank waits for ever, or the time is over
    traceback    anything else
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from forked import ForkedCommand

from meshwright.runtime.template import Template

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "survey"
PLANS = {
    "tp2": "--nproc 2 --tp 2",
    "pp2": "--nproc 2 --pp 2",
    "cp2": "--nproc 2 --cp 2",
    "ZeRO 3": "--nproc 2 --zero 3",
    "tp2 pp2": "--nproc 4 --tp 2 --pp 2",
    "recompute": "--nproc 2 --recompute full",
}
"""Name → flags. Degrees that are not named are dp."""
NUM_STEPS = 3
WAIT_SECONDS = 90
"""After so long a wait for another rank, a rank says that it hangs."""
LIMIT_SECONDS = 300
"""For one cell, on a machine that others use too."""
LOOK_SECONDS = 0.02
GOOD = ("parity", "refused")


@dataclass(frozen=True)
class Architecture:
    name: str
    group: str
    model: str
    """As `meshwright parity` takes it."""
    file: Path


@dataclass(frozen=True)
class Cell:
    architecture: Architecture
    plan: str

    def __str__(self) -> str:
        return f"{self.architecture.name} {self.plan}"

    @property
    def command(self) -> list[str]:
        flags = f"{PLANS[self.plan]} --steps {NUM_STEPS} --timeout {WAIT_SECONDS} --device cpu --json"
        return ["meshwright", "parity", self.architecture.model, *flags.split()]


@dataclass(frozen=True)
class Outcome:
    kind: str
    words: str = ""
    """The reason, where the cell is not at parity."""
    seconds: float = 0.0
    """Of processors, by the command and its ranks."""


def architectures(folder: Path = FOLDER) -> list[Architecture]:
    files = sorted([*folder.glob("*.*"), *folder.glob("*/*.*")], key=lambda file: (file.parent != folder, file))
    found = [one for file in files for one in _in_file(file)]
    names = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{folder}: two architectures are called {twice}: give each a name of its own")
    return found


def _in_file(file: Path) -> Iterator[Architecture]:
    if file.suffix == ".json":
        yield Architecture(file.stem, file.parent.name, f"hf:{file}", file)
    if file.suffix == ".py":
        for function in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_") and not _takes_any(function):
                yield Architecture(function.name, file.parent.name, f"{file}:{function.name}", file)


def _takes_any(function: ast.FunctionDef) -> bool:
    given = function.args
    return bool(given.posonlyargs or given.args or given.kwonlyargs or given.vararg or given.kwarg)


def cells(folder: Path = FOLDER) -> list[Cell]:
    return [Cell(architecture, plan) for architecture in architectures(folder) for plan in PLANS]


def stamp(architecture: Architecture) -> str:
    """Changes with the library, the architecture's file, torch and transformers: what was found before is stale then."""
    return hashlib.sha256(f"{of_library()}{_text(architecture.file)}".encode()).hexdigest()[:16]


def of_library() -> str:
    texts = [f"{file.relative_to(ROOT)}{_text(file)}" for file in sorted((ROOT / "src").rglob("*.py"))]
    texts += [version("torch"), version("transformers")]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def run_cells(todo: Iterable[Cell], template: Template, at_once: int = 1) -> Iterator[tuple[Cell, Outcome]]:
    """Each cell as it ends; so many of them run side by side, on cores of their own where there are two for each."""
    waiting, running, cores = list(todo), list[_Running](), _cores_for(at_once)
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(_Running(waiting.pop(0), template, cores.pop()))
        for one in [one for one in running if one.has_ended()]:
            running.remove(one)
            cores.append(one.cores)
            yield one.cell, one.outcome()
        time.sleep(LOOK_SECONDS)


def _cores_for(at_once: int) -> list[set[int]]:
    every = sorted(os.sched_getaffinity(0))
    each = len(every) // at_once
    return [set(every[number * each :][:each]) if each > 1 else set(every) for number in range(at_once)]


class _Running:
    """One `meshwright parity`, in a folder of its own."""

    def __init__(self, cell: Cell, template: Template, cores: set[int]) -> None:
        self.cell, self.cores, self.started, self.is_late = cell, cores, time.monotonic(), False
        self.folder = Path(tempfile.mkdtemp(prefix="meshwright-survey-"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = ForkedCommand(template, cell.command, environment, self.folder)
        os.sched_setaffinity(self.process.pid, cores)  # before it starts ranks, which are bound to cores out of these

    def has_ended(self) -> bool:
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.started > LIMIT_SECONDS and not self.is_late:
            self.is_late = True
            self.process.kill()  # its ranks end with it
        return False

    def outcome(self) -> Outcome:
        out, err = self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)
        seconds = round(self.process.cpu_seconds, 1)
        if self.is_late:
            return Outcome("hang", f"did not end within {LIMIT_SECONDS} s", seconds)
        kind, words = read_ending(self.process.returncode or 0, out, err)
        return Outcome(kind, words.replace(f"{ROOT}/", ""), seconds)


def read_ending(code: int, out: str, err: str) -> tuple[str, str]:
    """What a cell's command came to, and its reason in one line."""
    last = out.strip().splitlines()[-1:]
    if last and last[0].startswith("{"):
        result = json.loads(last[0])
        return ("parity", "") if result["ok"] and code == 0 else ("wrong", str(result["first_difference"]))
    said = err.partition("error: ")[2].strip()
    if code == 2 and said:
        return "refused", _first_line(said)
    if re.match(r"ranks? .* hangs?: |all \d+ ranks have waited ", said):
        return "hang", _first_line(said)
    return "traceback", _first_line(said) if said else _last_line(err, code)


def _first_line(text: str) -> str:
    """Without the number of the rank that said it, which is another one each time."""
    return re.sub(r"^rank \d+ of \d+ failed: ", "", text.strip().splitlines()[0])


def _last_line(err: str, code: int) -> str:
    lines = [line for line in err.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ended with {code} and said nothing"
